// What lies between a decoder's products of matrices: RMS norm, gate and rotation, forward and backward.
//
// Values are rounded where PyTorch's own functions round them in the forward pass, and once in the backward pass.

#include "vectors.h"

namespace {

template <typename T>
void norm(const T *x, const T *weight, T *out, float *inverse, int64_t rows, int64_t dim, float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        vec squares{};
        for (long j = 0; j < dim; j += WIDTH) {
            const vec value = load(x + i * dim + j);
            squares += value * value;
        }
        const float scale = inverse[i] = 1.0f / sqrtf(sum(squares) / dim + eps);
        for (long j = 0; j < dim; j += WIDTH)
            store(out + i * dim + j, load(weight + j) * rounded<T>(load(x + i * dim + j) * scale));
    }
}

// Gradients of x, and of the weight by way of sums over `parts` ranges of rows, [parts, dim]; the first becomes it.
template <typename T>
void norm_backward(const T *x, const T *weight, const float *inverse, const T *upstream, T *dx, float *dweight,
                   int64_t rows, int64_t dim, int64_t parts, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (long part = 0; part < parts; part++) {
        float *total = dweight + part * dim;
        memset(total, 0, sizeof(float) * dim);
        for (long i = rows * part / parts; i < rows * (part + 1) / parts; i++) {
            vec dot{};
            for (long j = 0; j < dim; j += WIDTH) {
                const vec normal = load(x + i * dim + j) * inverse[i], grad = load(upstream + i * dim + j);
                store(total + j, load(total + j) + grad * rounded<T>(normal));
                dot += grad * load(weight + j) * normal;
            }
            const float mean = sum(dot) / dim;
            for (long j = 0; j < dim; j += WIDTH) {
                const vec normal = load(x + i * dim + j) * inverse[i];
                store(dx + i * dim + j, (load(upstream + i * dim + j) * load(weight + j) - normal * mean) * inverse[i]);
            }
        }
    }
    for (long part = 1; part < parts; part++)
        for (long j = 0; j < dim; j += WIDTH) store(dweight + j, load(dweight + j) + load(dweight + part * dim + j));
}

inline vec sigmoid(vec x) {
    const ints negative = x < all(0.0f);
    const vec e = exponential(negative ? x : -x);
    return (negative ? e : all(1.0f)) / (1.0f + e);
}

template <typename T>
void gate(const T *x, const T *up, T *out, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < count; i += WIDTH) {
        const vec value = load(x + i);
        store(out + i, rounded<T>(value * sigmoid(value)) * load(up + i));
    }
}

// Writes the gradients of x and up over them.
template <typename T>
void gate_backward(T *x, T *up, const T *upstream, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < count; i += WIDTH) {
        const vec value = load(x + i), other = load(up + i), grad = load(upstream + i), s = sigmoid(value);
        store(up + i, grad * rounded<T>(value * s));
        store(x + i, grad * other * s * (1.0f + value * (1.0f - s)));
    }
}

// x [rows, heads, dim], whose first `turned` dimensions are rotated by tables [rows, turned], the others copied.
template <typename T>
void rotate(const T *x, const T *cosines, const T *sines, T *out, int64_t rows, int64_t heads, int64_t dim,
            int64_t turned, bool back, int64_t threads) {
    const long half = turned / 2;
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++)
        for (long h = 0; h < heads; h++) {
            const T *from = x + (i * heads + h) * dim, *c = cosines + i * turned, *s = sines + i * turned;
            T *to = out + (i * heads + h) * dim;
            for (long j = 0; j < half; j += WIDTH) {
                const vec a = load(from + j), b = load(from + half + j);
                const vec early = load(s + j), late = load(s + half + j);
                const vec first = back ? late : early, second = back ? early : late;
                store(to + j, rounded<T>(a * load(c + j)) + rounded<T>(b * first));
                store(to + half + j, rounded<T>(b * load(c + half + j)) + rounded<T>(a * second));
            }
            memcpy(to + turned, from + turned, sizeof(T) * (dim - turned));
        }
}

inline vec shuffled(vec a, vec b, ints places) {  // places from WIDTH on are those of b
#if defined(__clang__)
    vec out;
    for (int i = 0; i < WIDTH; i++) out[i] = places[i] < WIDTH ? a[places[i]] : b[places[i] - WIDTH];
    return out;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

// One of the stages of a transposition: exchanges halves of `STEP` numbers between the vectors that are STEP apart.
template <int STEP>
inline void exchange(vec *v) {
    if constexpr (STEP > 0) {
        ints first, second;
        for (int i = 0; i < WIDTH; i++) {
            first[i] = i & STEP ? WIDTH + i - STEP : i;
            second[i] = i & STEP ? WIDTH + i : i + STEP;
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++)
            if (!(i & STEP)) {
                const vec a = v[i], b = v[i + STEP];
                v[i] = shuffled(a, b, first), v[i + STEP] = shuffled(a, b, second);
            }
        exchange<STEP / 2>(v);
    }
}

}  // namespace

// out [columns, rows] = the transposed x [rows, columns].
extern "C" int transpose(const float *x, float *out, int64_t rows, int64_t columns, int64_t threads) {
    const long high = rows / WIDTH * WIDTH, wide = columns / WIDTH * WIDTH;
#pragma omp parallel for num_threads(threads)
    for (long j = 0; j < wide; j += WIDTH) {
        for (long i = 0; i < high; i += WIDTH) {
            vec v[WIDTH];
#pragma GCC unroll 16
            for (int r = 0; r < WIDTH; r++) v[r] = load(x + (i + r) * columns + j);
            exchange<WIDTH / 2>(v);
#pragma GCC unroll 16
            for (int c = 0; c < WIDTH; c++) store(out + (j + c) * rows + i, v[c]);
        }
        for (long i = high; i < rows; i++)
            for (long c = j; c < j + WIDTH; c++) out[c * rows + i] = x[i * columns + c];
    }
    for (long c = wide; c < columns; c++)
        for (long i = 0; i < rows; i++) out[c * rows + i] = x[i * columns + c];
    return 0;
}

#define FOR(name, T)                                                                                                  \
    extern "C" int norm_##name(const T *x, const T *weight, T *out, float *inverse, int64_t rows, int64_t dim,         \
                               float eps, int64_t threads) {                                                          \
        norm(x, weight, out, inverse, rows, dim, eps, threads);                                                       \
        return 0;                                                                                                     \
    }                                                                                                                 \
    extern "C" int norm_backward_##name(const T *x, const T *weight, const float *inverse, const T *upstream, T *dx,   \
                                        float *dweight, int64_t rows, int64_t dim, int64_t parts, int64_t threads) {  \
        norm_backward(x, weight, inverse, upstream, dx, dweight, rows, dim, parts, threads);                          \
        return 0;                                                                                                     \
    }                                                                                                                 \
    extern "C" int gate_##name(const T *x, const T *up, T *out, int64_t count, int64_t threads) {                     \
        gate(x, up, out, count, threads);                                                                             \
        return 0;                                                                                                     \
    }                                                                                                                 \
    extern "C" int gate_backward_##name(T *x, T *up, const T *upstream, int64_t count, int64_t threads) {             \
        gate_backward(x, up, upstream, count, threads);                                                               \
        return 0;                                                                                                     \
    }                                                                                                                 \
    extern "C" int rotate_##name(const T *x, const T *cosines, const T *sines, T *out, int64_t rows, int64_t heads,    \
                                 int64_t dim, int64_t turned, int64_t back, int64_t threads) {                        \
        rotate(x, cosines, sines, out, rows, heads, dim, turned, back, threads);                                      \
        return 0;                                                                                                     \
    }
FOR(float, float)
FOR(bf16, bf16)
