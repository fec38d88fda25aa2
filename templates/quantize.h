// 8-bit storage: f8e4m3 (no infinity, NaN 0x7f), f8e5m2 and s8. A memory word holds two columns in its low 16 bits.
//
// `pack` rounds to nearest even; what rounds beyond the largest value is NaN in f8e4m3, infinity in f8e5m2.
// `pack_saturated` stays at the largest value, which is what the hardware's conversion does; NaN stays NaN. s8 only
// saturates, and NaN is 0.
#pragma once
#include "scalar.h"

namespace coda {

struct f8e4m3 { uint8_t bits; };
struct f8e5m2 { uint8_t bits; };

// The magnitude of x, rounded to a float of kMantissa bits and exponent bias kBias: its code if the exponent had no end.
template <int kMantissa, int kBias> CODA_FN uint32_t round_magnitude(float x) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kLeastNormal = uint32_t(128 - kBias) << 23, kRebias = uint32_t(127 - kBias) << 23;
  constexpr uint32_t kStep = uint32_t(151 - kBias - kMantissa) << 23;  // a float whose last place is the subnormals' step
  uint32_t const u = bits(x) & 0x7fffffffu;
  if (u < kLeastNormal) return bits(from_bits(u) + from_bits(kStep)) - kStep;  // the float addition rounds
  return (u + (1u << (kShift - 1)) - 1u + ((u >> kShift) & 1u) - kRebias) >> kShift;
}

// What both fp8 formats share. Format: kMantissa, kBias, kLargest (code), kMax, kBeyond (the code of what is too large).
template <class Format> struct Storage8 {
  static constexpr int kMantissa = Format::kMantissa, kBias = Format::kBias;
  CODA_FN static uint32_t round_bits(float x, uint32_t beyond) {
    if (x != x) return 0x7fu;
    uint32_t const magnitude = round_magnitude<kMantissa, kBias>(x);
    return (bits(x) >> 24 & 0x80u) | (magnitude > Format::kLargest ? beyond : magnitude);
  }
  CODA_FN static uint32_t pack(float lo, float hi) {
    return round_bits(lo, Format::kBeyond) | round_bits(hi, Format::kBeyond) << 8;
  }
  CODA_FN static uint32_t pack_saturated(float lo, float hi) {
#if defined(__CUDA_ARCH__)
    return Format::convert(lo, hi);
#else
    return round_bits(lo, Format::kLargest) | round_bits(hi, Format::kLargest) << 8;
#endif
  }
  CODA_FN static float lo(uint32_t w) { return widen(w & 0xffu); }
  CODA_FN static float hi(uint32_t w) { return widen(w >> 8 & 0xffu); }
  CODA_FN static float widen(uint32_t code) {
    uint32_t const sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
    if (magnitude > Format::kLargest)
      return from_bits(magnitude == Format::kInfinity ? sign | 0x7f800000u : 0x7fc00000u);
    uint32_t const exponent = magnitude >> kMantissa;
    float const step = from_bits(uint32_t(128 - kBias - kMantissa) << 23);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(magnitude) * step;
    return from_bits(sign | ((magnitude << (23 - kMantissa)) + (uint32_t(127 - kBias) << 23)));
  }
  static constexpr float kMax = Format::kMax;
};

struct FormatE4M3 {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr uint32_t kLargest = 0x7e, kBeyond = 0x7f, kInfinity = 0;  // it has none
  static constexpr float kMax = 448.0f;
#if defined(__CUDA_ARCH__)
  CODA_FN static uint32_t convert(float lo, float hi) {
    uint16_t d; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo)); return d;
  }
#endif
};
struct FormatE5M2 {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr uint32_t kLargest = 0x7b, kBeyond = 0x7c, kInfinity = 0x7c;
  static constexpr float kMax = 57344.0f;
#if defined(__CUDA_ARCH__)
  CODA_FN static uint32_t convert(float lo, float hi) {
    uint16_t d; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo)); return d;
  }
#endif
};
template <> struct Storage<f8e4m3> : Storage8<FormatE4M3> {};
template <> struct Storage<f8e5m2> : Storage8<FormatE5M2> {};

template <> struct Storage<int8_t> {
  CODA_FN static int32_t round_integer(float x) {
#if defined(__CUDA_ARCH__)
    int32_t d; asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(d) : "f"(x)); return d;
#else
    return x != x ? 0 : int32_t(std::nearbyint(min(max(x, -128.0f), 127.0f)));
#endif
  }
  CODA_FN static uint32_t pack_saturated(float lo, float hi) {
    return (uint32_t(round_integer(lo)) & 0xffu) | (uint32_t(round_integer(hi)) & 0xffu) << 8;
  }
  CODA_FN static uint32_t pack(float lo, float hi) { return pack_saturated(lo, hi); }
  CODA_FN static float lo(uint32_t w) { return float(int8_t(w)); }
  CODA_FN static float hi(uint32_t w) { return float(int8_t(w >> 8)); }
};

CODA_FN float load(f8e4m3 const* p) { return Storage<f8e4m3>::widen(p->bits); }
CODA_FN float load(f8e5m2 const* p) { return Storage<f8e5m2>::widen(p->bits); }
CODA_FN int32_t load(int8_t const* p) { return *p; }

}  // namespace coda
