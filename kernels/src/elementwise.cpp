// Steps between linear layers, compiled for every instruction set and chosen at run time.
#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "half.h"
#include "linear_tasks.h"

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "elementwise.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/highway.h"
#include "weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));

void normalize(const Norm& norm, int64_t first, int64_t last) {
  const F d;
  const int64_t size = norm.size, whole = size / (4 * kLanes) * 4 * kLanes;
  for (int64_t row = first; row < last; ++row) {
    const float* const source = norm.source + row * size;
    float* const out = norm.out + row * size;
    V sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
    for (int64_t i = 0; i < whole; i += 4 * kLanes) {
      EC_EACH(j, 4) {
        const V x = hn::LoadU(d, source + i + j * kLanes);
        sums[j] = hn::MulAdd(x, x, sums[j]);
      }
    }
    float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]))));
    for (int64_t i = whole; i < size; ++i) sum += source[i] * source[i];
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + norm.epsilon);
    const V by = hn::Set(d, factor);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const V x = hn::Mul(hn::LoadU(d, source + i), by);
      hn::StoreU(norm.weight ? hn::Mul(x, hn::LoadU(d, norm.weight + i)) : x, d, out + i);
    }
    for (; i < size; ++i) out[i] = source[i] * factor * (norm.weight ? norm.weight[i] : 1.0f);
  }
}

void rotate(const Rotation& r, int64_t first, int64_t last) {
  const F d;
  const int64_t half = r.dim / 2;
  for (int64_t row = first; row < last; ++row) {
    const int64_t token = row % r.tokens, head = row / r.tokens % r.heads, batch = row / r.tokens / r.heads;
    const float* const low = static_cast<const float*>(r.source.data) + batch * r.source.batch_stride +
                             head * r.source.head_stride + token * r.source.token_stride;
    const float* const high = low + half;
    const int64_t angle = batch * r.angle_stride + token * r.dim;
    const float *const cos = r.cos + angle, *const sin = r.sin + angle;
    float* const out = r.out + row * r.dim;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const V a = hn::LoadU(d, low + i), b = hn::LoadU(d, high + i);
      const V left = hn::Mul(a, hn::LoadU(d, cos + i)), right = hn::Mul(b, hn::LoadU(d, cos + half + i));
      hn::StoreU(hn::NegMulAdd(b, hn::LoadU(d, sin + i), left), d, out + i);
      hn::StoreU(hn::MulAdd(a, hn::LoadU(d, sin + half + i), right), d, out + half + i);
    }
    for (; i < half; ++i) {
      out[i] = low[i] * cos[i] - high[i] * sin[i];
      out[half + i] = high[i] * cos[half + i] + low[i] * sin[half + i];
    }
  }
}

// x * sigmoid(x * (first + third * x^2)). The square is bounded, because infinity times a `third` of 0 is not a number.
HWY_INLINE V gated(V x, V first, V third) {
  const F d;
  const V one = hn::Set(d, 1.0f), square = hn::Min(hn::Mul(x, x), hn::Set(d, std::numeric_limits<float>::max()));
  const V z = hn::Mul(x, hn::MulAdd(square, third, first));
  const V power = exp_of_low(hn::Neg(hn::Abs(z)));
  const V above = hn::IfThenElse(hn::Lt(z, hn::Zero(d)), power, one);
  return hn::Mul(x, hn::Div(above, hn::Add(one, power)));
}

void gate(const Gate& g, int64_t from, int64_t end) {
  const F d;
  const V first = hn::Set(d, g.first), third = hn::Set(d, g.third);
  int64_t i = from;
  for (; i + kLanes <= end; i += kLanes) {
    const V x = gated(hn::LoadU(d, g.source + i), first, third);
    hn::StoreU(hn::Mul(x, hn::LoadU(d, g.factor + i)), d, g.out + i);
  }
  for (; i < end; ++i) g.out[i] = hn::GetLane(gated(hn::Set(d, g.source[i]), first, third)) * g.factor[i];
}

void narrow(const Narrowing& n, int64_t first, int64_t last) {
  int64_t i = first;
  if (n.dtype == Dtype::kBFloat16) {
    for (; i < last; ++i) n.out[i] = bfloat16_of_float(n.source[i]);
    return;
  }
#if HWY_TARGET != HWY_SSE4
  // SSE4 has no conversion, and Highway's does not round.
  const hn::Rebind<hwy::float16_t, F> halves;
  for (; i + kLanes <= last; i += kLanes) {
    hn::StoreU(hn::DemoteTo(halves, hn::LoadU(F(), n.source + i)), halves, reinterpret_cast<hwy::float16_t*>(n.out + i));
  }
#endif
  for (; i < last; ++i) n.out[i] = float16_of_float(n.source[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace exportable_cache::kernels {
HWY_EXPORT(normalize);
HWY_EXPORT(rotate);
HWY_EXPORT(gate);
HWY_EXPORT(narrow);

namespace {

template <class Step>
struct Shares {
  const Step& step;
  void (*apply)(const Step&, int64_t first, int64_t last);
  int64_t count, share;
};

template <class Step>
void apply_share(void* context, size_t index) {
  const auto& work = *static_cast<const Shares<Step>*>(context);
  const int64_t first = static_cast<int64_t>(index) * work.share;
  work.apply(work.step, first, std::min(first + work.share, work.count));
}

// Applies a step to `count` rows of some values, in a few shares per thread.
template <class Step>
void in_shares(const Step& step, void (*apply)(const Step&, int64_t, int64_t), int64_t count, int64_t values,
               const Threads& threads) {
  const int64_t wanted = static_cast<int64_t>(threads.count) * kTasksOfThread;
  Shares<Step> work{step, apply, count, std::max<int64_t>(1, (count + wanted - 1) / wanted)};
  run_tasks(threads, (count + work.share - 1) / work.share, apply_share<Step>, &work, count * values > kWorthAThread / 4);
}

}  // namespace

void apply_narrowing(const Narrowing& narrowing, const Threads& threads) {
  in_shares(narrowing, HWY_DYNAMIC_DISPATCH(narrow), narrowing.count, 1, threads);
}

void apply_norm(const Norm& norm, const Threads& threads) {
  in_shares(norm, HWY_DYNAMIC_DISPATCH(normalize), norm.rows, norm.size, threads);
}

void apply_rotation(const Rotation& rotation, const Threads& threads) {
  in_shares(rotation, HWY_DYNAMIC_DISPATCH(rotate), rotation.batch * rotation.heads * rotation.tokens, rotation.dim, threads);
}

void apply_gate(const Gate& gated, const Threads& threads) {
  in_shares(gated, HWY_DYNAMIC_DISPATCH(gate), gated.count, 1, threads);
}

}  // namespace exportable_cache::kernels
#endif  // HWY_ONCE
