// Vectors of floats as wide as the CPU's registers, numbers of 16 bits, and the product of small matrices.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 12;  // floats of a register; rows of a tile, whose sums stay in registers
#elif defined(__AVX__)
constexpr int WIDTH = 8, ROWS = 6;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, ROWS = 12;
#else
constexpr int WIDTH = 4, ROWS = 6;
#endif
constexpr int PANEL = 2 * WIDTH;  // columns of a tile

inline long least(long a, long b) { return a < b ? a : b; }
inline long up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline vec load(const float *at) { return *reinterpret_cast<const unaligned *>(at); }
inline void store(float *at, vec x) { *reinterpret_cast<unaligned *>(at) = x; }
inline vec all(float x) { return x - vec{}; }
inline vec larger(vec a, vec b) { return a > b ? a : b; }

struct bf16 {
    uint16_t bits;
};
typedef uint16_t shorts __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t unaligned_shorts __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

// 16 bits widened and narrowed; GCC 12 takes many instructions where the CPU has one
inline ints widened(shorts x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, ints);
#endif
}
inline shorts narrowed(ints x) {
#if defined(__AVX512F__)
    return (shorts)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x & 0xffff, shorts);
#endif
}

inline vec wide(shorts x) { return (vec)(widened(x) << 16); }
inline vec load(const bf16 *at) { return wide(*reinterpret_cast<const unaligned_shorts *>(at)); }

// to bf16, ties to even; a NaN that was computed stays one; a CPU that does it in one instruction takes denormals as 0
inline shorts nearest(vec x) {
#if defined(__AVX512BF16__)
    return (shorts)_mm512_cvtneps_pbh((__m512)x);
#else
    const ints bits = (ints)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return narrowed((x == x ? rounded : bits) >> 16);
#endif
}
inline void store(bf16 *at, vec x) { *reinterpret_cast<unaligned_shorts *>(at) = nearest(x); }

inline float number(float x) { return x; }
inline float number(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// x as it would be after it was written
template <typename T>
inline vec rounded(vec x);
template <>
inline vec rounded<float>(vec x) {
    return x;
}
template <>
inline vec rounded<bf16>(vec x) {
    return wide(nearest(x));
}

// A number of all, by halves: one after the other would wait for each.
inline float sum(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
#endif
}

inline float largest(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
#endif
}

// exp(x) for x at most 0 (or a rounding error above); 0 below -86, as denormals follow soon; a NaN stays.
// x = n ln 2 + r, and a polynomial of degree 6 gives exp(r) to 2 units in the last place.
inline vec exponential(vec x) {
    const vec least = all(-86.0f), magic = all(12582912.0f);  // adding 1.5 · 2²³ rounds to an integer
#if defined(__AVX512F__)
    const vec within = x;  // what is below becomes 0 at the end, whatever it is
#else
    const vec within = larger(x, least);
#endif
    const vec shifted = within * 1.44269504f + magic, n = shifted - magic;
    vec r = within - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
    const ints scaled = (ints)p + ((ints)shifted << 23);
    return (vec)((scaled & ~(x < least)) | (ints)(x != x));
#endif
}

// What a product multiplies: a number, or two of 16 bits that are neighbours along its depth.
struct __attribute__((may_alias)) pair {
    uint32_t bits;
};
inline vec all(pair x) { return (vec)(ints{} + (int32_t)x.bits); }
inline vec load(const pair *at) { return load(reinterpret_cast<const float *>(at)); }

inline vec add_product(vec total, vec a, vec b, float) { return total + a * b; }
inline vec paired(vec early, vec late) { return (vec)(widened(nearest(early)) | widened(nearest(late)) << 16); }
#if defined(__AVX512BF16__)
typedef bf16 Narrow;  // what numbers of 16 bits are multiplied as
inline vec add_product(vec total, vec a, vec b, pair) {
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}
#else
typedef float Narrow;
#endif

// c [M, N · WIDTH] = a · b, or += it, for a [M, depth] with strides (am, ak) and b [depth, ..] with rows of ldb.
template <int M, int N, bool ADD, typename T>
inline __attribute__((always_inline)) void tile(const T *a, long am, long ak, const T *b, long ldb, float *c, long ldc,
                                                long depth) {
    vec total[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) total[m][n] = ADD ? load(c + m * ldc + n * WIDTH) : vec{};
    for (long k = 0; k < depth; k++) {
        vec right[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) right[n] = load(b + k * ldb + n * WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const vec left = all(a[m * am + k * ak]);
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) total[m][n] = add_product(total[m][n], left, right[n], T{});
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) store(c + m * ldc + n * WIDTH, total[m][n]);
}

template <int N, bool ADD, typename T>
void columns(long rows, const T *a, long am, long ak, const T *b, long ldb, float *c, long ldc, long depth) {
    long m = 0;
    for (; m + ROWS <= rows; m += ROWS) tile<ROWS, N, ADD>(a + m * am, am, ak, b, ldb, c + m * ldc, ldc, depth);
    for (; m + 4 <= rows; m += 4) tile<4, N, ADD>(a + m * am, am, ak, b, ldb, c + m * ldc, ldc, depth);
    for (; m + 2 <= rows; m += 2) tile<2, N, ADD>(a + m * am, am, ak, b, ldb, c + m * ldc, ldc, depth);
    for (; m < rows; m++) tile<1, N, ADD>(a + m * am, am, ak, b, ldb, c + m * ldc, ldc, depth);
}

// c [rows, width] = a · b, or += it; width is a multiple of WIDTH.
template <bool ADD, typename T>
void product(long rows, long width, long depth, const T *a, long am, long ak, const T *b, long ldb, float *c,
             long ldc) {
    long n = 0;
    for (; n + PANEL <= width; n += PANEL) columns<2, ADD>(rows, a, am, ak, b + n, ldb, c + n, ldc, depth);
    if (n < width) columns<1, ADD>(rows, a, am, ak, b + n, ldb, c + n, ldc, depth);
}

// Products of bf16 in place of oneDNN's, but where the CPU multiplies matrices of it (AMX), for which these are not made.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define MULTIPLIES_PAIRS 1

inline const pair *pairs(const bf16 *x) { return reinterpret_cast<const pair *>(x); }

// A panel's numbers in a register, in their order.
inline __m512i panel(const bf16 *at) { return _mm512_loadu_si512(at); }
inline __m512i panel(vec low, vec high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
inline __m512i panel(const float *at) { return panel(load(at), load(at + WIDTH)); }
inline vec low(__m512i x) { return wide((shorts)_mm512_castsi512_si256(x)); }
inline vec high(__m512i x) { return wide((shorts)_mm512_extracti64x4_epi64(x, 1)); }

constexpr long AHEAD = 8;  // rows whose memory is asked for before they are read

// Two panels as pairs [PANEL].
inline void interleave(__m512i early, __m512i late, pair *out) {
    const __m512i begin = (__m512i)(__v32hi){0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                             8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i end = _mm512_add_epi16(begin, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(early, begin, late));
    _mm512_storeu_si512(out + WIDTH, _mm512_permutex2var_epi16(early, end, late));
}

// `width` columns of x [rows, stride] as pairs of rows, of which an odd last one has zeros: panel i, pair k at
// out + i · depth · PANEL + k · row.
inline void along(const bf16 *x, long rows, long stride, long width, long depth, long row, pair *out) {
    for (long r = 0; r < rows; r += 2, x += 2 * stride)
        for (long i = 0; i < width; i += PANEL) {
            __builtin_prefetch(x + AHEAD * stride + i), __builtin_prefetch(x + (AHEAD + 1) * stride + i);
            interleave(panel(x + i), r + 1 < rows ? panel(x + stride + i) : __m512i{}, out + i * depth + r / 2 * row);
        }
}
#endif

}  // namespace
