// Body of a kernel (row_norm.cuh): with n = (res - mean) * rstd and g = d_x * (weight + OFFSET)
// d_out = d_res + rstd * (g - mean(g) - n * mean(g * n)), where the mean and mean(g) are CENTERED's;
// partial (1 + BIAS, parts, C) <- the sums of d_x * n, and of d_x. Both stay in registers for all rows of a block.
// A block owns `per_block` rows, a multiple of 256 where column sums are wanted. d_out may be the memory of d_res.
    extern __shared__ __align__(16) u8 tile[];  // [ROWS][PITCH] where the transposed form is wanted
    __shared__ float shared[2][GROUPS][GROUP];
    int group = threadIdx.x / (32 * GROUP), column = threadIdx.x % (32 * GROUP) * N;
    i64 block_row = static_cast<i64>(blockIdx.x) * per_block, begin = block_row * C + column;
    int end = static_cast<int>(min(rows - block_row, static_cast<i64>(per_block)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_out));
    sink.begin_at(begin);
    d_x += begin, d_res += begin, res += begin, rstd += block_row, weight += column;
    if constexpr (CENTERED) mean += block_row;
    float d_weight[VPT][N] = {}, d_bias[VPT][N] = {};
    int slot = 0;
    struct Row {
        Pack<T, N> res[VPT], d_x[VPT];
        float rstd;
    } next;
    auto begin_reading = [&](int row) {
        if (row >= end) return;
        next.rstd = rstd[row];
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            int at = row * C + k * STEP;
            if (column + k * STEP >= C) break;
            next.res[k].load_early<AHEAD>(res + at);
            next.d_x[k].load_early<AHEAD>(d_x + at);
        }
    };
    if constexpr (AHEAD) begin_reading(group);
    for (int first = 0; first < end; first += ROWS) {
        for (int r = group; r < ROWS; r += GROUPS, slot ^= 1) {
            int row = first + r;
            if (row >= end) break;
            if constexpr (!AHEAD) begin_reading(row);
            Row own = next;
            Pack<T, N> through[VPT];
#pragma unroll
            for (int k = 0; k < VPT; k++)
                if (RESIDUAL && FORMS != 0 && column + k * STEP < C) through[k].load_early<AHEAD>(d_res + row * C + k * STEP);
            if constexpr (AHEAD) begin_reading(row + GROUPS);  // also across tiles: ROWS is a multiple of GROUPS
            float dot = 0, s = own.rstd;
            float total = 0, m = 0;
            if constexpr (CENTERED) m = mean[row];
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                if (column + k * STEP >= C) break;
                float n[N], d[N], w[N];
                load_weights<OFFSET>(weight + k * STEP, w);
                own.res[k].get(n);
                own.d_x[k].get(d);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    if constexpr (CENTERED) n[j] -= m;
                    n[j] *= s;
                    dot = fmaf(d[j] * w[j], n[j], dot);
                    d_weight[k][j] = fmaf(d[j], n[j], d_weight[k][j]);
                    if constexpr (CENTERED) total = fmaf(d[j], w[j], total);
                    if constexpr (BIAS) d_bias[k][j] += d[j];
                }
            }
            if constexpr (FORMS == 0) continue;
            float along = group_sum(dot, shared, CENTERED ? 0 : slot) * (1.0f / C);
            float level = 0;
            if constexpr (CENTERED) level = group_sum(total, shared, 1) * (1.0f / C);
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                if (column + k * STEP >= C) break;
                float n[N], d[N], w[N];
                load_weights<OFFSET>(weight + k * STEP, w);
                own.res[k].get(n);
                own.d_x[k].get(d);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    if constexpr (CENTERED)
                        d[j] = s * (d[j] * w[j] - level - (n[j] - m) * s * along);
                    else
                        d[j] = s * (d[j] * w[j] - n[j] * s * along);
                }
                if constexpr (RESIDUAL) {
                    through[k].get(n);
#pragma unroll
                    for (int j = 0; j < N; j++) d[j] += n[j];
                }
                sink.put(row * C + k * STEP, d, tile + tile_at<ROWS>(r, column + k * STEP, PITCH));
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_columns<ROWS, THREADS>(
                tile, PITCH, d_out_col, C, [](int c) { return c; }, block_row + first, rows, tall);
            __syncthreads();
        }
    }
    sink.finish();
    if (!partial) return;
    // groups are added in order, through the block's own row of the partial sums
    float* own = partial + static_cast<i64>(blockIdx.x) * C;
    for (int g = 0; g < GROUPS; g++) {
        if (g == group) {
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                int at = column + k * STEP;
                if (at >= C) break;
                if (g) {
                    float before[N];
                    load(own + at, before);
#pragma unroll
                    for (int j = 0; j < N; j++) d_weight[k][j] += before[j];
                }
                store(own + at, d_weight[k]);
                if constexpr (BIAS) {
                    float* of_bias = own + static_cast<i64>(gridDim.x) * C + at;
                    if (g) {
                        float before[N];
                        load(of_bias, before);
#pragma unroll
                        for (int j = 0; j < N; j++) d_bias[k][j] += before[j];
                    }
                    store(of_bias, d_bias[k]);
                }
            }
        }
        __syncthreads();
    }
