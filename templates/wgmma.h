// The wgmma atom for operand types, layouts and a tile width: CuTe's own, and those widths that CuTe offers only under
// CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED, a macro that doubles compile time because it brings in every width.
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

namespace coda {

using cute::GMMA::Major;

// wgmma.mma_async.m64n160k16, f32 += Element * Element, both operands in shared memory.
template <class Element, Major kMajorA, Major kMajorB>
struct Wgmma64x160 {
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[80];

#define CODA_D8(x, i) float &x##i##0, float &x##i##1, float &x##i##2, float &x##i##3, float &x##i##4, float &x##i##5, \
                      float &x##i##6, float &x##i##7
#define CODA_F8(x, i) "+f"(x##i##0), "+f"(x##i##1), "+f"(x##i##2), "+f"(x##i##3), "+f"(x##i##4), "+f"(x##i##5), \
                      "+f"(x##i##6), "+f"(x##i##7)
#define CODA_WGMMA_160(types)                                                                                         \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n160k16.f32." types " {"                                                       \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "                                                                      \
      "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "                                                            \
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "                                                            \
      "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "                                                            \
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "                                                            \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "                                                            \
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "                                                            \
      "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                                                              \
      "}, %80, %81, p, 1, 1, %83, %84;\n}\n"                                                                          \
      : CODA_F8(d, 0), CODA_F8(d, 1), CODA_F8(d, 2), CODA_F8(d, 3), CODA_F8(d, 4), CODA_F8(d, 5), CODA_F8(d, 6),      \
        CODA_F8(d, 7), CODA_F8(d, 8), CODA_F8(d, 9)                                                                   \
      : "l"(a), "l"(b), "r"(int32_t(scale)), "n"(int32_t(kMajorA)), "n"(int32_t(kMajorB)))
  CUTE_HOST_DEVICE static void fma(uint64_t const& a, uint64_t const& b, CODA_D8(d, 0), CODA_D8(d, 1), CODA_D8(d, 2),
                                   CODA_D8(d, 3), CODA_D8(d, 4), CODA_D8(d, 5), CODA_D8(d, 6), CODA_D8(d, 7),
                                   CODA_D8(d, 8), CODA_D8(d, 9),
                                   cute::GMMA::ScaleOut const scale = cute::GMMA::ScaleOut::One) {
#if defined(CUTE_ARCH_MMA_SM90A_ENABLED)
    if constexpr (cute::is_same_v<Element, cutlass::half_t>) CODA_WGMMA_160("f16.f16");
    else CODA_WGMMA_160("bf16.bf16");
#endif
  }
#undef CODA_WGMMA_160
#undef CODA_D8
#undef CODA_F8
};

// Rows of M or N in a block of an MN-major operand, one beside the other: 64 are the 128 bytes of a swizzle, and where
// a tile has no whole number of those, the 64 bytes of another.
constexpr int block_rows(int rows) { return rows % 64 == 0 ? 64 : 32; }

// The atom of one warp group for a tile of kTileN columns.
template <class Element, int kTileN, Major kA, Major kB>
constexpr auto wgmma() {
  constexpr bool kHalf = cute::is_same_v<Element, cutlass::half_t>;
  static_assert(kHalf || cute::is_same_v<Element, cutlass::bfloat16_t>, "operands are f16 or bf16");
  namespace gmma = cute::SM90::GMMA;
  if constexpr (kTileN == 128 && kHalf) return gmma::MMA_64x128x16_F32F16F16_SS<kA, kB>{};
  else if constexpr (kTileN == 128) return gmma::MMA_64x128x16_F32BF16BF16_SS<kA, kB>{};
  else if constexpr (kTileN == 160) return Wgmma64x160<Element, kA, kB>{};
  else if constexpr (kTileN == 192 && kHalf) return gmma::MMA_64x192x16_F32F16F16_SS<kA, kB>{};
  else if constexpr (kTileN == 192) return gmma::MMA_64x192x16_F32BF16BF16_SS<kA, kB>{};
  else if constexpr (kTileN == 256 && kHalf) return gmma::MMA_64x256x16_F32F16F16_SS<kA, kB>{};
  else if constexpr (kTileN == 256) return gmma::MMA_64x256x16_F32BF16BF16_SS<kA, kB>{};
}

}  // namespace coda

template <class Element, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct cute::MMA_Traits<coda::Wgmma64x160<Element, kMajorA, kMajorB>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = cute::GMMA::smem_desc<kMajorA>;
  using FrgTypeB = cute::GMMA::smem_desc<kMajorB>;
  using Shape_MNK = cute::Shape<cute::_64, cute::Int<160>, cute::_16>;
  using ThrID = cute::Layout<cute::_128>;
  using ALayout = cute::GMMA::ABLayout<64, 16>;
  using BLayout = cute::GMMA::ABLayout<160, 16>;
  using CLayout = cute::GMMA::CLayout_64xN<160>;
  cute::GMMA::ScaleOut accumulate_ = cute::GMMA::ScaleOut::One;
};
