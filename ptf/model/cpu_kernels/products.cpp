// The gradient of a projection's weight in bf16: a product along the rows of two matrices. Sums are in fp32, and added in
// one order, however many threads there are.

#include <cstdlib>

#include "vectors.h"

#ifdef MULTIPLIES_PAIRS
extern "C" int multiplies_pairs() { return 1; }

namespace {

constexpr long TALL = 384, BROAD = 256, DEEP = 256;  // a block of the gradient, and rows that it adds at a time

struct Space {
    float sums[TALL * BROAD];
    pair left[DEEP / 2 * (TALL + WIDTH)], right[DEEP / 2 * BROAD];  // rows of no multiple of a page; panels
};

// A block [tall, broad] of `out` [m, n]; a and b begin with its columns.
void block(const bf16 *a, const bf16 *b, bf16 *out, long rows, long m, long n, long tall, long broad, Space &at) {
    for (long r = 0; r < rows; r += DEEP) {
        const long count = least(rows - r, DEEP), depth = (count + 1) / 2;
        along(a + r * m, count, m, tall, 1, TALL + WIDTH, at.left);
        along(b + r * n, count, n, broad, depth, PANEL, at.right);
        for (long i = 0; i < broad; i += PANEL) {
            const pair *panel = at.right + i * depth;
            if (r) columns<2, true>(tall, at.left, 1, TALL + WIDTH, panel, PANEL, at.sums + i, BROAD, depth);
            else columns<2, false>(tall, at.left, 1, TALL + WIDTH, panel, PANEL, at.sums + i, BROAD, depth);
        }
    }
    for (long t = 0; t < tall; t++)
        for (long i = 0; i < broad; i += PANEL) _mm512_storeu_si512(out + t * n + i, panel(at.sums + t * BROAD + i));
}

}  // namespace

// out [m, n] = aᵀ · b for a [rows, m] and b [rows, n], m and n multiples of PANEL; rows are at least one.
extern "C" int transposed_product(const bf16 *a, const bf16 *b, bf16 *out, int64_t rows, int64_t m, int64_t n,
                                  int64_t threads) {
    long tall = TALL, broad = BROAD;  // smaller where there would be fewer blocks than threads
    while (tall > PANEL && up(m, tall) / tall * (up(n, broad) / broad) < threads) tall = up(tall / 2, PANEL);
    while (broad > PANEL && up(m, tall) / tall * (up(n, broad) / broad) < threads) broad /= 2;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        Space *at = static_cast<Space *>(aligned_alloc(64, up(sizeof(Space), 64)));
        failed = at == nullptr;
#pragma omp for collapse(2) schedule(dynamic)
        for (long i = 0; i < m; i += tall)
            for (long j = 0; j < n; j += broad)
                if (at) block(a + i, b + j, out + i * n + j, rows, m, n, least(m - i, tall), least(n - j, broad), *at);
        free(at);
    }
    return failed;
}
#else
extern "C" int multiplies_pairs() { return 0; }
#endif
