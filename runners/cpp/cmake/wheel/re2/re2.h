// Headers of the pytorch-tokenizers wheel include this one, and use nothing of it except for what it includes itself.
#pragma once

#include <functional>
