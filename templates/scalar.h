// Scalar math of the generated visitor bodies. Host and device: tests compile the same body with a host compiler and
// compare it with the reference interpreter.
//
// A body works on `Two<T>`: two neighbouring columns of one row, which is how accumulators lie in registers. Every
// function here takes floats and is lifted to Two elementwise; values of a row or a scalar broadcast.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CODA_FN __host__ __device__ __forceinline__
#define CODA_UNROLL _Pragma("unroll")
#else
#define CODA_FN inline
#define CODA_UNROLL
#endif

namespace coda {

// ---- storage types: bit patterns; arithmetic happens in float ----
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

CODA_FN uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u; std::memcpy(&u, &x, 4); return u;
#endif
}
CODA_FN float from_bits(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x; std::memcpy(&x, &u, 4); return x;
#endif
}

// ---- two neighbouring columns ----
template <class T> struct Two { T x, y; };

#define CODA_LIFT_OPERATOR(op)                                                                              \
  template <class A, class B> CODA_FN auto operator op(Two<A> a, Two<B> b) -> Two<decltype(a.x op b.x)> {   \
    return {a.x op b.x, a.y op b.y};                                                                        \
  }                                                                                                         \
  template <class A> CODA_FN auto operator op(Two<A> a, A b) -> Two<decltype(a.x op b)> {                   \
    return {a.x op b, a.y op b};                                                                            \
  }                                                                                                         \
  template <class A> CODA_FN auto operator op(A a, Two<A> b) -> Two<decltype(a op b.x)> {                   \
    return {a op b.x, a op b.y};                                                                            \
  }
CODA_LIFT_OPERATOR(+)
CODA_LIFT_OPERATOR(-)
CODA_LIFT_OPERATOR(*)
CODA_LIFT_OPERATOR(==)
CODA_LIFT_OPERATOR(!=)
CODA_LIFT_OPERATOR(<)
CODA_LIFT_OPERATOR(<=)
CODA_LIFT_OPERATOR(>)
CODA_LIFT_OPERATOR(>=)
#undef CODA_LIFT_OPERATOR
template <class A> CODA_FN Two<A> operator-(Two<A> a) { return {-a.x, -a.y}; }
template <class A> CODA_FN Two<A> spread(A a) { return {a, a}; }
template <class A> CODA_FN Two<A> spread(Two<A> a) { return a; }

#define CODA_LIFT_UNARY(name) \
  template <class T> CODA_FN Two<T> name(Two<T> a) { return {name(a.x), name(a.y)}; }
#define CODA_LIFT_BINARY(name)                                                                             \
  template <class T> CODA_FN Two<T> name(Two<T> a, Two<T> b) { return {name(a.x, b.x), name(a.y, b.y)}; }  \
  template <class T> CODA_FN Two<T> name(Two<T> a, T b) { return {name(a.x, b), name(a.y, b)}; }           \
  template <class T> CODA_FN Two<T> name(T a, Two<T> b) { return {name(a, b.x), name(a, b.y)}; }

// Whether columns n and n + 1 are the one at `position`; in 32 bits, which a column fits.
CODA_FN Two<bool> is_column(int n, int64_t position) {
  int32_t const column = position == int32_t(position) ? int32_t(position) : -1;
  return {n == column, n + 1 == column};
}

// ---- conversions between the arithmetic types (float, int64_t, int32_t, bool) ----
template <class To, class From> CODA_FN To convert(From a) { return To(a); }
template <class To, class From> CODA_FN Two<To> convert(Two<From> a) { return {To(a.x), To(a.y)}; }

// ---- arithmetic ----
CODA_FN float div(float a, float b) { return a / b; }
CODA_LIFT_BINARY(div)

// NaN if either is NaN, as torch.maximum and torch.minimum.
CODA_FN float max(float a, float b) {
#if defined(__CUDA_ARCH__)
  float d; asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d;
#else
  return (a != a || a > b) ? a : b;
#endif
}
CODA_FN float min(float a, float b) {
#if defined(__CUDA_ARCH__)
  float d; asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d;
#else
  return (a != a || a < b) ? a : b;
#endif
}
CODA_FN int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
CODA_FN int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
CODA_FN int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }
CODA_FN int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
CODA_LIFT_BINARY(max)
CODA_LIFT_BINARY(min)
CODA_FN float abs(float a) { return from_bits(bits(a) & 0x7fffffffu); }
CODA_FN int64_t abs(int64_t a) { return a < 0 ? -a : a; }
CODA_FN int32_t abs(int32_t a) { return a < 0 ? -a : a; }
CODA_LIFT_UNARY(abs)
CODA_FN float sign(float a) { return float(a > 0.0f) - float(a < 0.0f); }  // 0 of NaN, as torch.sign
CODA_FN int64_t sign(int64_t a) { return (a > 0) - (a < 0); }
CODA_FN int32_t sign(int32_t a) { return (a > 0) - (a < 0); }
CODA_LIFT_UNARY(sign)

template <class T> CODA_FN T where(bool c, T a, T b) { return c ? a : b; }
template <class T> CODA_FN Two<T> where(bool c, Two<T> a, Two<T> b) { return {c ? a.x : b.x, c ? a.y : b.y}; }
template <class T> CODA_FN Two<T> where(bool c, Two<T> a, T b) { return {c ? a.x : b, c ? a.y : b}; }
template <class T> CODA_FN Two<T> where(bool c, T a, Two<T> b) { return {c ? a : b.x, c ? a : b.y}; }
template <class T> CODA_FN Two<T> where(Two<bool> c, T a, T b) { return {c.x ? a : b, c.y ? a : b}; }
template <class T> CODA_FN Two<T> where(Two<bool> c, Two<T> a, Two<T> b) { return {c.x ? a.x : b.x, c.y ? a.y : b.y}; }
template <class T> CODA_FN Two<T> where(Two<bool> c, Two<T> a, T b) { return {c.x ? a.x : b, c.y ? a.y : b}; }
template <class T> CODA_FN Two<T> where(Two<bool> c, T a, Two<T> b) { return {c.x ? a : b.x, c.y ? a : b.y}; }

// ---- transcendentals: the hardware's exponential and reciprocal (2 ulp each, subnormals flushed), one instruction
// each; everything else as in the CUDA math library ----
CODA_FN float exp2(float a) {
#if defined(__CUDA_ARCH__)
  float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a)); return d;
#else
  return std::exp2(a);
#endif
}
CODA_FN float reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  float d; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a)); return d;
#else
  return 1.0f / a;
#endif
}
constexpr float kLog2E = 1.4426950408889634f;
// Relative error up to (2 + |a|) 2^-24: the product is rounded. Enough for what is stored in 16 bits, and for softmax.
CODA_FN float exp(float a) { return exp2(kLog2E * a); }
// 1 / (1 + 2^b); 2^b overflows to infinity, whose reciprocal is 0.
CODA_FN float logistic2(float b) { return reciprocal(1.0f + exp2(b)); }
CODA_FN float sigmoid(float a) { return logistic2(-kLog2E * a); }
CODA_FN float log(float a) { return ::logf(a); }
CODA_FN float sqrt(float a) { return ::sqrtf(a); }
CODA_FN float rsqrt(float a) {
#if defined(__CUDA_ARCH__)
  return ::rsqrtf(a);
#else
  return 1.0f / ::sqrtf(a);
#endif
}
CODA_FN float tanh(float a) { return ::tanhf(a); }
CODA_FN float erf(float a) { return ::erff(a); }
CODA_FN float expm1(float a) { return ::expm1f(a); }
CODA_LIFT_UNARY(exp)
CODA_LIFT_UNARY(sigmoid)
CODA_LIFT_UNARY(log)
CODA_LIFT_UNARY(sqrt)
CODA_LIFT_UNARY(rsqrt)
CODA_LIFT_UNARY(tanh)
CODA_LIFT_UNARY(erf)
CODA_LIFT_UNARY(expm1)

// ---- activations ----
CODA_FN float relu(float a) { return max(a, 0.0f); }
CODA_FN float silu(float a) { return a * sigmoid(a); }
CODA_FN float gelu_erf(float a) { return 0.5f * a * (1.0f + erf(0.7071067811865476f * a)); }
// 0.5 (1 + tanh(u)) = sigmoid(2u), 2u = 2 sqrt(2/pi) (a + 0.044715 a^3): one exponential and one reciprocal. This and
// quick_gelu are written as their derivatives are (coda/ops/pointwise.py), so that a kernel with both computes one.
CODA_FN float gelu_tanh(float a) {
  return a * sigmoid(a * (1.5957691216057308f + 0.07135481627260025f * (a * a)));
}
CODA_FN float relu2(float a) { return relu(a) * relu(a); }
CODA_FN float quick_gelu(float a) { return a * sigmoid(1.702f * a); }
CODA_FN float softplus(float a) { return max(a, 0.0f) + ::log1pf(exp(-abs(a))); }
CODA_FN float hardswish(float a) { return a * min(max(a + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f); }
CODA_LIFT_UNARY(relu)
CODA_LIFT_UNARY(silu)
CODA_LIFT_UNARY(gelu_erf)
CODA_LIFT_UNARY(gelu_tanh)
CODA_LIFT_UNARY(relu2)
CODA_LIFT_UNARY(quick_gelu)
CODA_LIFT_UNARY(softplus)
CODA_LIFT_UNARY(hardswish)

// ---- rounding to 16-bit storage, and back: pack<D> makes the memory word of two columns (8 bits: quantize.h) ----
template <class D> struct Storage;

template <> struct Storage<bf16> {
  CODA_FN static uint32_t pack(float lo, float hi) {
#if defined(__CUDA_ARCH__)
    uint32_t d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d;
#else
    return round_bits(lo) | round_bits(hi) << 16;
#endif
  }
  CODA_FN static float lo(uint32_t w) { return from_bits(w << 16); }
  CODA_FN static float hi(uint32_t w) { return from_bits(w & 0xffff0000u); }
  CODA_FN static uint32_t round_bits(float x) {  // round to nearest even; NaN stays NaN
    uint32_t u = bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  }
  static constexpr float kMax = 3.3895313892515355e38f;
};

template <> struct Storage<f16> {
  CODA_FN static uint32_t pack(float lo, float hi) {
#if defined(__CUDA_ARCH__)
    uint32_t d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d;
#else
    return round_bits(lo) | round_bits(hi) << 16;
#endif
  }
  CODA_FN static float lo(uint32_t w) { return widen(uint16_t(w)); }
  CODA_FN static float hi(uint32_t w) { return widen(uint16_t(w >> 16)); }
  CODA_FN static float widen(uint16_t h) {
#if defined(__CUDA_ARCH__)
    float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f;
#else
    uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
#endif
  }
  CODA_FN static uint32_t round_bits(float x) {
    uint32_t u = bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
    if (magnitude < 0x38800000u)                          // subnormal: let float addition round
      return sign | (bits(from_bits(magnitude) + 0.5f) - 0x3f000000u);
    return sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13);
  }
  static constexpr float kMax = 65504.0f;
};

template <class D> CODA_FN uint32_t pack(Two<float> a) { return Storage<D>::pack(a.x, a.y); }
template <class D> CODA_FN uint32_t pack(float a) { return Storage<D>::pack(a, a); }
template <class D> CODA_FN uint32_t pack_saturated(Two<float> a) { return Storage<D>::pack_saturated(a.x, a.y); }
template <class D> CODA_FN uint32_t pack_saturated(float a) { return Storage<D>::pack_saturated(a, a); }
template <class D> CODA_FN Two<float> unpack(uint32_t w) { return {Storage<D>::lo(w), Storage<D>::hi(w)}; }
template <class D> CODA_FN float round(float a) { return Storage<D>::lo(Storage<D>::pack(a, 0.0f)); }
template <class D> CODA_FN Two<float> round(Two<float> a) { return unpack<D>(pack<D>(a)); }
// Saturating casts clamp to the largest finite value first; NaN stays NaN.
template <class D, class T> CODA_FN T saturate(T a) { return min(max(a, -Storage<D>::kMax), Storage<D>::kMax); }

// ---- loads and stores of single elements ----
CODA_FN float load(bf16 const* p) { return from_bits(uint32_t(p->bits) << 16); }
CODA_FN float load(f16 const* p) { return Storage<f16>::widen(p->bits); }
CODA_FN float load(float const* p) { return *p; }
CODA_FN int64_t load(int64_t const* p) { return *p; }
CODA_FN int32_t load(int32_t const* p) { return *p; }
CODA_FN bool load(bool const* p) { return *p; }
CODA_FN void put(bf16* p, float a) { p->bits = uint16_t(Storage<bf16>::pack(a, 0.0f)); }
CODA_FN void put(f16* p, float a) { p->bits = uint16_t(Storage<f16>::pack(a, 0.0f)); }
CODA_FN void put(float* p, float a) { *p = a; }

}  // namespace coda
