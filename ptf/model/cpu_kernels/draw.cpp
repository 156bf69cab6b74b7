// Tokens drawn from the softmax of logits by inverse transform of random numbers. A row is computed by itself.

#include <omp.h>

#include <cstdlib>

#include "vectors.h"

namespace {

// The first of `count` exponentials at which their sum exceeds `target`; if rounding lets none, the last that is not 0.
long drawn(const float *e, long count, double target) {
    double before = 0.0;
    for (long first = 0; first < count; first += WIDTH) {
        const double after = before + sum(load(e + first));
        double so_far = before;
        for (long i = first; after > target && i < first + WIDTH; i++)
            if (e[i] > 0.0f && (so_far += e[i]) > target) return i;  // a block's sum may round up
        before = after;
    }
    long last = count - 1;
    while (last > 0 && !(e[last] > 0.0f)) last--;
    return last;
}

template <typename T>
int draw(const T *logits, const float *temperature, const double *draws, int64_t *tokens, float *logprobs, long rows,
         long columns, long threads) {
    const long count = up(columns, WIDTH), whole = columns / WIDTH * WIDTH;
    float *memory = static_cast<float *>(malloc(sizeof(float) * threads * count));
    if (!memory) return 1;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        float *e = memory + omp_get_thread_num() * count;
        const T *given = logits + row * columns;
        vec most = all(-INFINITY);
        for (long i = 0; i < whole; i += WIDTH) store(e + i, load(given + i) / temperature[row]);
        for (long i = whole; i < count; i++) e[i] = i < columns ? number(given[i]) / temperature[row] : -INFINITY;
        for (long i = 0; i < count; i += WIDTH) most = larger(most, load(e + i));
        const float high = largest(most);
        double total = 0.0;
        for (long i = 0; i < count; i += WIDTH) {
            const vec part = exponential(load(e + i) - high);
            store(e + i, part);
            total += sum(part);
        }
        tokens[row] = drawn(e, count, draws[row] * total);
        logprobs[row] = number(given[tokens[row]]) / temperature[row] - high - (float)log(total);
    }
    free(memory);
    return 0;
}

}  // namespace

// Of logits [rows, columns], divided by the temperature of a row, and numbers in [0, 1): tokens and their log-probs,
// [rows] each. 1 without memory.
#define DRAW(NAME, TYPE)                                                                                          \
    extern "C" int draw_##NAME(const TYPE *logits, const float *temperature, const double *draws, int64_t *tokens, \
                               float *logprobs, int64_t rows, int64_t columns, int64_t threads) {                  \
        return draw(logits, temperature, draws, tokens, logprobs, rows, columns, threads);                         \
    }
DRAW(float, float)
DRAW(bf16, bf16)
