// Body of a kernel (row_norm.cuh): x, mean, rstd <- res, weight, bias, residual. x may be the memory of the residual. A
// block transposes only when all of its rows are there. A transposed copy may be that of more rows (`tall`) than are here.
    extern __shared__ __align__(16) u8 tile[];  // [ROWS][PITCH] where the transposed form is wanted
    __shared__ float shared[2][GROUPS][GROUP];
    int group = threadIdx.x / (32 * GROUP), column = threadIdx.x % (32 * GROUP) * N;
    i64 block_row = static_cast<i64>(blockIdx.x) * ROWS;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, x));
    Pack<T, N> next[VPT];
    auto begin_reading = [&](int r) {
        if (r >= ROWS || block_row + r >= rows) return;
        const T* from = res + (block_row + r) * C + column;
#pragma unroll
        for (int k = 0; k < VPT; k++)
            if (column + k * STEP < C) next[k].load_early<AHEAD>(from + k * STEP);
    };
    if constexpr (AHEAD) begin_reading(group);
    for (int r = group; r < ROWS; r += GROUPS) {
        i64 row = block_row + r;
        if (row >= rows) break;
        Pack<T, N> read[VPT], through[VPT];
        float sum = 0, m = 0, v[N];
        if constexpr (!AHEAD) begin_reading(r);
#pragma unroll
        for (int k = 0; k < VPT; k++) read[k] = next[k];
        if constexpr (AHEAD) begin_reading(r + GROUPS);
#pragma unroll
        for (int k = 0; k < VPT; k++)
            if (ADDED && FORMS != 0 && column + k * STEP < C) through[k].load(residual + row * C + column + k * STEP);
        if constexpr (CENTERED) {
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                if (column + k * STEP >= C) break;
                read[k].get(v);
#pragma unroll
                for (int j = 0; j < N; j++) m += v[j];
            }
            m = group_sum(m, shared, 0) * (1.0f / C);
        }
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            if (column + k * STEP >= C) break;
            read[k].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if constexpr (CENTERED) v[j] -= m;
                sum = fmaf(v[j], v[j], sum);
            }
        }
        float s = 1.0f / sqrtf(group_sum(sum, shared, CENTERED ? 1 : r / GROUPS % 2) * (1.0f / C) + eps);
        if (rstd && threadIdx.x % (32 * GROUP) == 0) rstd[row] = s;
        if (CENTERED && mean && threadIdx.x % (32 * GROUP) == 0) mean[row] = m;
        if constexpr (FORMS == 0) continue;
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            int at = column + k * STEP;
            if (at >= C) break;
            float w[N];
            load_weights<OFFSET>(weight + at, w);
            read[k].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if constexpr (CENTERED) v[j] -= m;
                v[j] *= s * w[j];
            }
            if constexpr (BIAS) load(bias + at, w);
            if constexpr (ADDED) through[k].get(w);
            if constexpr (BIAS || ADDED) {
#pragma unroll
                for (int j = 0; j < N; j++) v[j] += w[j];
            }
            sink.put(row * C + at, v, tile + tile_at<ROWS>(r, at, PITCH));
        }
    }
    if constexpr ((FORMS & COL) != 0) {
        __syncthreads();
        write_columns<ROWS, THREADS>(tile, PITCH, x_col, C, [](int c) { return c; }, block_row, rows, tall);
    }
    sink.finish();
