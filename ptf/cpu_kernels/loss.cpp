// Log-probs of targets, and the gradient of their cross-entropy, row by row of logits that lie in a buffer.

#include "vectors.h"

namespace {

constexpr float LOST = -64.0f;  // probabilities below e⁻⁶⁴ are lost in any sum, and products over denormals are slow

template <typename T>
float one_row(T *row, long real, long columns, long target, float weight, bool gradient) {
    const long whole = real / WIDTH * WIDTH;
    vec high = all(-INFINITY), added{}, more{};
    for (long j = 0; j < whole; j += WIDTH) high = larger(high, load(row + j));
    float most = largest(high);
    for (long j = whole; j < real; j++) most = number(row[j]) > most ? number(row[j]) : most;
    for (long j = 0; j < whole; j += WIDTH) added += exponential(load(row + j) - most);
    float last[WIDTH];  // the columns after the last whole vector, and nothing after them
    for (long j = 0; j < WIDTH; j++) last[j] = whole + j < real ? number(row[whole + j]) - most : -INFINITY;
    more = exponential(load(last));
    const float normaliser = logf(sum(added + more)), found = number(row[target]) - most - normaliser;
    if (!gradient) return found;
    for (long j = 0; j < columns; j += WIDTH) {
        const bool partly = j + WIDTH > real;
        if (partly)
            for (long i = 0; i < WIDTH; i++) last[i] = j + i < real ? number(row[j + i]) - most : -INFINITY;
        const vec x = (partly ? load(last) : load(row + j) - most) - normaliser;
        const vec p = (vec)((ints)exponential(x) & (x > LOST)) * weight;
        if (j + WIDTH <= columns) {
            store(row + j, p);
        } else {
            T end[WIDTH];
            store(end, p);
            memcpy(row + j, end, sizeof(T) * (columns - j));
        }
    }
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
