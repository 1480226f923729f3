// Of pthreadpool, whose header the wheel does not ship, what ExecuTorch's threadpool.h names.
#pragma once

struct pthreadpool;
typedef struct pthreadpool* pthreadpool_t;
extern "C" void pthreadpool_destroy(pthreadpool_t);
