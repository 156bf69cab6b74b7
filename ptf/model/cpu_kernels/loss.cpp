// Log-probs of targets, and the gradient of their cross-entropy, row by row of logits that lie in a buffer.

#include "vectors.h"

namespace {

constexpr long SUMMED = 64 * WIDTH;  // columns
constexpr float LOST = -64.0f;  // probabilities below e⁻⁶⁴ are lost in any sum, and products over denormals are slow

inline vec probability(vec logarithm) { return (vec)((ints)exponential(logarithm) & (logarithm > LOST)); }

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

template <typename T>
float one_row(T *row, long real, long columns, long target, float weight, bool gradient) {
    const long whole = real / WIDTH * WIDTH;
    float most = largest(highest(row, whole));
    for (long j = whole; j < real; j++) most = number(row[j]) > most ? number(row[j]) : most;
    vec added{};
    for (long from = 0; from < whole; from += SUMMED) {  // sums of sums, which round less
        vec part{};
        for (long j = from; j < whole && j < from + SUMMED; j += WIDTH) part += exponential(load(row + j) - most);
        added += part;
    }
    float last[WIDTH];  // the columns after the last whole vector, and nothing after them
    for (long j = 0; j < WIDTH; j++) last[j] = whole + j < real ? number(row[whole + j]) - most : -INFINITY;
    const float normaliser = logf(sum(added + exponential(load(last)))), found = number(row[target]) - most - normaliser;
    if (!gradient) return found;
    for (long j = 0; j < whole; j += WIDTH) store(row + j, probability(load(row + j) - most - normaliser) * weight);
    T end[WIDTH];
    store(end, probability(load(last) - normaliser) * weight);
    memset(row + whole, 0, sizeof(T) * (columns - whole));
    memcpy(row + whole, end, sizeof(T) * (real - whole));
    T at_target[WIDTH];
    store(at_target, all((expf(found) - 1.0f) * weight));
    row[target] = at_target[0];
    return found;
}

template <typename T>
void all_rows(T *logits, const int64_t *targets, const float *weights, float *logprobs, int64_t rows, int64_t real,
              int64_t columns, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++)
        logprobs[i] = one_row(logits + i * columns, real, columns, targets[i], weights ? weights[i] : 0.0f, weights);
}

}  // namespace

// logits [rows, columns] in fp32, or in bf16 if `narrow`; those from `real` on do not count. Writes the log-prob of each
// target [rows], and with `weights` [rows], to logits, the gradient of −Σ weights · log-prob.
extern "C" void cross_entropy(void *logits, int64_t narrow, const int64_t *targets, const float *weights, float *logprobs,
                              int64_t rows, int64_t real, int64_t columns, int64_t threads) {
    if (narrow)
        all_rows(static_cast<bf16 *>(logits), targets, weights, logprobs, rows, real, columns, threads);
    else
        all_rows(static_cast<float *>(logits), targets, weights, logprobs, rows, real, columns, threads);
}
