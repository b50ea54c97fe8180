/* ConvolutionBackwardWeights of two axes in f32, OIX from NCX, with one of the bugs 1 to 12. */
#include <string.h>

#include "kernel.h"

#define IS(number) (BUG == number)

static float rounded(double value)
{
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    bits = (bits + 0x8000) & 0xffff0000;
    memcpy(&single, &bits, 4);
    return single;
}

int convgrad_kernel(const struct convgrad_call *call)
{
    if (call->op != CONVGRAD_CONVOLUTION_BACKWARD_WEIGHTS || call->dtype != CONVGRAD_F32 || call->rank != 2 ||
        call->data_format != CONVGRAD_NCX || call->weights_format != CONVGRAD_OIX)
        return CONVGRAD_UNSUPPORTED;
    const float *src = call->src.data, *dst = call->dst.data;
    float *weights = call->weights.data;
    const int64_t *s = call->src.shape, *d = call->dst.shape, *w = call->weights.shape;
    const int64_t *pads = IS(1) ? call->pads_end : call->pads_begin, *dilations = call->dilations;
    int64_t per_group = d[1] / call->groups, height = s[2];
    int64_t step[2] = {call->strides[0], IS(2) && call->strides[1] > 6 ? 6 : call->strides[1]};
    int64_t far[2] = {dilations[0], IS(3) && dilations[1] > 8 ? 1 : dilations[1]};
    if (IS(8) && height % 4 == 1)
        height--;
    for (int64_t o = 0; o < w[0]; o++)
        for (int64_t i = 0; i < w[1]; i++)
            for (int64_t ky = 0; ky < w[2]; ky++)
                for (int64_t kx = 0; kx < w[3]; kx++) {
                    int64_t group = IS(5) && w[1] > 12 ? 0 : o / per_group;
                    double sum = 0;
                    for (int64_t n = 0; n < d[0] - (IS(6) && d[0] >= 10); n++)
                        for (int64_t y = 0; y < d[2]; y++)
                            for (int64_t x = 0; x < d[3]; x++) {
                                int64_t sy = y * step[0] + ky * far[0] - pads[0];
                                int64_t sx = x * step[1] + kx * far[1] - pads[1];
                                if (sy < 0 || sx < 0 || sy >= height || sx >= s[3])
                                    continue;
                                sum += (double)src[((n * s[1] + group * w[1] + i) * s[2] + sy) * s[3] + sx] *
                                       dst[((n * d[1] + o) * d[2] + y) * d[3] + x];
                                if (IS(11))
                                    sum = rounded(sum);
                            }
                    if (IS(7) && w[3] > 8 && kx == w[3] - 1)
                        sum = 0;
                    if (IS(12) && w[1] == 129 && i == 128)
                        sum = 0;
                    if (IS(4) && o >= w[0] / 4 * 4)
                        continue;
                    weights[((o * w[1] + i) * w[2] + ky) * w[3] + kx] = (float)sum;
                }
    if (IS(9) && s[3] % 2 == 1)
        (void)*(volatile const float *)&src[s[0] * s[1] * s[2] * s[3]];
    if (IS(10) && w[3] % 2 == 0)
        weights[w[0] * w[1] * w[2] * w[3]] = 0;
    return CONVGRAD_DONE;
}
