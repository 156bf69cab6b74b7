// Log-probs of targets, and the gradient of their cross-entropy, row by row of logits that lie in a buffer.

#include <cstdlib>

#include "vectors.h"

namespace {

constexpr long SUMMED = 64 * WIDTH;  // columns
constexpr float LOST = 1.6e-28f;  // e⁻⁶⁴: a smaller probability is lost in any sum, and denormals are slow

inline vec without(vec x, float small) { return (vec)((ints)x & ~(ints)(x <= small)); }

template <typename T>
vec highest(const T *row, long count) {
    vec a = all(-INFINITY), b = a, c = a, d = a;  // four, because one would wait for itself
    long j = 0;
    for (; j + 4 * WIDTH <= count; j += 4 * WIDTH) {
        a = larger(a, load(row + j)), b = larger(b, load(row + j + WIDTH));
        c = larger(c, load(row + j + 2 * WIDTH)), d = larger(d, load(row + j + 3 * WIDTH));
    }
    for (; j < count; j += WIDTH) a = larger(a, load(row + j));
    return larger(larger(a, b), larger(c, d));
}

// The log-prob of a row's target; with `gradient`, the row becomes the gradient, by way of exponentials in `scratch`.
template <typename T>
float one_row(T *row, float *scratch, long real, long columns, long target, float weight, bool gradient) {
    const long whole = real / WIDTH * WIDTH;
    float most = largest(highest(row, whole)), last[WIDTH];
    for (long j = whole; j < real; j++) most = number(row[j]) > most ? number(row[j]) : most;
    for (long j = 0; j < WIDTH; j++) last[j] = whole + j < real ? number(row[whole + j]) - most : -INFINITY;
    const vec rest = exponential(load(last));
    const float at_target = number(row[target]) - most;
    vec added = rest;
    for (long from = 0; from < whole; from += SUMMED) {  // sums of sums, which round less
        vec part{};
        for (long j = from; j < whole && j < from + SUMMED; j += WIDTH) {
            const vec e = exponential(load(row + j) - most);
            if (gradient) store(scratch + j, e);
            part += e;
        }
        added += part;
    }
    const float total = sum(added), found = at_target - logf(total);
    if (!gradient) return found;
    const float factor = weight / total, lost = LOST * total;
    for (long j = 0; j < whole; j += WIDTH) store(row + j, without(load(scratch + j), lost) * factor);
    T end[WIDTH];
    store(end, without(rest, lost) * factor);
    memset(row + whole, 0, sizeof(T) * (columns - whole));
    memcpy(row + whole, end, sizeof(T) * (real - whole));
    store(end, all((expf(found) - 1.0f) * weight));
    row[target] = end[0];
    return found;
}

template <typename T>
int all_rows(T *logits, const int64_t *targets, const float *weights, float *logprobs, int64_t rows, int64_t real,
             int64_t columns, int64_t threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *fresh = nullptr;  // exponentials in fp32, which logits of fp32 give their place
        if (sizeof(T) < sizeof(float) && weights) {
            fresh = static_cast<float *>(aligned_alloc(64, up(sizeof(float) * real, 64)));
            failed = fresh == nullptr;
        }
#pragma omp for
        for (long i = 0; i < rows; i++) {
            T *row = logits + i * columns;
            float *scratch = sizeof(T) < sizeof(float) ? fresh : reinterpret_cast<float *>(row);
            if (!failed)
                logprobs[i] = one_row(row, scratch, real, columns, targets[i], weights ? weights[i] : 0.0f, weights);
        }
        free(fresh);
    }
    return failed;
}

}  // namespace

// logits [rows, columns] in fp32, or in bf16 if `narrow`; those from `real` on do not count. Writes the log-prob of
// each target [rows], and with `weights` [rows], to logits, the gradient of −Σ weights · log-prob; 1 without memory.
extern "C" int cross_entropy(void *logits, int64_t narrow, const int64_t *targets, const float *weights,
                             float *logprobs, int64_t rows, int64_t real, int64_t columns, int64_t threads) {
    return narrow ? all_rows(static_cast<bf16 *>(logits), targets, weights, logprobs, rows, real, columns, threads)
                  : all_rows(static_cast<float *>(logits), targets, weights, logprobs, rows, real, columns, threads);
}

// Adds x [count] in bf16 to `total` in fp32, or writes it there if it is the `first`.
extern "C" int add_rounded(float *total, const bf16 *x, int64_t count, int64_t first, int64_t threads) {
    const long whole = count / WIDTH * WIDTH;
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < whole; i += WIDTH) store(total + i, first ? load(x + i) : load(total + i) + load(x + i));
    for (long i = whole; i < count; i++) total[i] = first ? number(x[i]) : total[i] + number(x[i]);
    return 0;
}
