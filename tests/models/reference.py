"""WXFormer transcribed from its definition, as plainly as possible: loops, literal paddings, literal convolutions.

It reads the weights of our model by name, works in the dtype of the weights (tests use fp64), and shares no code with it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


class Weights:
    """Return the state dict, with weights divided by sigma = u^T W v where u and v are stored."""

    def __init__(self, state):
        self.state = state

    def __call__(self, prefix, output_dim=0):
        weight = self.state[f"{prefix}.weight"]
        if f"{prefix}.spectral.u" in self.state:
            u, v = self.state[f"{prefix}.spectral.u"], self.state[f"{prefix}.spectral.v"]
            matrix = weight.transpose(0, output_dim).reshape(len(u), len(v))
            weight = weight / (u.to(weight) @ matrix @ v.to(weight))
        return weight

    def bias(self, prefix):
        return self.state.get(f"{prefix}.bias")


def pad_image(x, conf):
    """x (B, C, H, W)."""
    if not conf.activate:
        return x
    (north, south), (west, east) = conf.pad_lat, conf.pad_lon
    height, width = x.shape[-2:]
    rows = []
    for r in range(-north, height + south):
        if 0 <= r < height:
            rows.append(x[..., r, :])
        elif conf.mode == "earth":
            source = -r - 1 if r < 0 else height - 1 - (r - height)
            rows.append(torch.roll(x[..., source, :], width // 2, dims=-1))
        elif conf.mode == "mirror":
            source = -r if r < 0 else height - 1 - (r - height + 1)
            rows.append(x[..., source, :])
        else:
            rows.append(x[..., 0 if r < 0 else height - 1, :])
    x = torch.stack(rows, dim=-2)
    columns = [min(max(c, 0), width - 1) if conf.mode == "replicate" else c % width for c in range(-west, width + east)]
    return torch.stack([x[..., c] for c in columns], dim=-1)


def cross_embed(x, weights, prefix, kernels, stride):
    outputs = []
    for i, kernel in enumerate(sorted(kernels)):
        before = (kernel - stride) // 2
        after = kernel - stride - before
        padded = F.pad(x, (before, after, before, after))
        name = f"{prefix}.convs.{i}"
        outputs.append(F.conv2d(padded, weights(name), weights.bias(name), stride=stride))
    return torch.cat(outputs, dim=1)


def channel_norm(x, weights, prefix):
    mean = x.mean(dim=1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=1, keepdim=True)
    g, b = weights.state[f"{prefix}.weight"], weights.state[f"{prefix}.bias"]
    return (x - mean) / torch.sqrt(variance + 1e-5) * g[:, None, None] + b[:, None, None]


def position_bias(weights, prefix, window, position_index):
    """(w^2, w^2) for every query and key."""
    reach = window if position_index == "credit" else window - 1
    offsets = [(y, x) for y in range(-reach, reach + 1) for x in range(-reach, reach + 1)]
    table = torch.tensor(offsets, dtype=weights(f"{prefix}.linears.0").dtype)
    for i in range(3):
        name = f"{prefix}.linears.{i}"
        table = table @ weights(name).T + weights.bias(name)
        mean, variance = table.mean(-1, keepdim=True), table.var(-1, keepdim=True, unbiased=False)
        norm = f"{prefix}.norms.{i}"
        table = (table - mean) / torch.sqrt(variance + 1e-5)
        table = torch.relu(table * weights.state[f"{norm}.weight"] + weights.state[f"{norm}.bias"])
    name = f"{prefix}.linears.3"
    table = (table @ weights(name).T + weights.bias(name))[:, 0]
    positions = [(y, x) for y in range(window) for x in range(window)]
    rows = []
    for yi, xi in positions:
        row = []
        for yj, xj in positions:
            dy, dx = yi - yj, xi - xj
            if position_index == "credit":
                entry = (dy + window - 1) * (2 * window - 1) + (dx + window - 1)
            else:
                entry = offsets.index((dy, dx))
            row.append(table[entry])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def attention(x, weights, prefix, window, dim_head, position_index, *, long):
    batch, channels, height, width = x.shape
    heads = channels // dim_head
    normed = channel_norm(x, weights, f"{prefix}.norm")
    qkv_weight = weights(f"{prefix}.qkv").reshape(heads, 3, dim_head, channels)
    q, k, v = (torch.einsum("hdc,bcyx->bhdyx", qkv_weight[:, i], normed) for i in range(3))
    bias = position_bias(weights, f"{prefix}.bias", window, position_index) if window > 1 else 0.0
    out = torch.zeros(batch, heads, dim_head, height, width, dtype=x.dtype)
    down, right = height // window, width // window
    for y in range(down):
        for c in range(right):
            if long:
                ys, xs = slice(y, None, down), slice(c, None, right)
            else:
                ys, xs = slice(y * window, (y + 1) * window), slice(c * window, (c + 1) * window)
            qw, kw, vw = (t[..., ys, xs].flatten(-2) for t in (q, k, v))
            scores = torch.einsum("bhdi,bhdj->bhij", qw * dim_head**-0.5, kw) + bias
            out[..., ys, xs] = torch.einsum("bhij,bhdj->bhdi", scores.softmax(-1), vw).unflatten(-1, (window, window))
    name = f"{prefix}.out"
    projected = torch.einsum("oc,bcyx->boyx", weights(name), out.flatten(1, 2))
    return x + projected + weights.bias(name)[:, None, None]


def feed_forward(x, weights, prefix):
    y = channel_norm(x, weights, f"{prefix}.norm")
    y = torch.einsum("oc,bcyx->boyx", weights(f"{prefix}.expand"), y) + weights.bias(f"{prefix}.expand")[:, None, None]
    y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    y = torch.einsum("oc,bcyx->boyx", weights(f"{prefix}.contract"), y)
    return x + y + weights.bias(f"{prefix}.contract")[:, None, None]


def conv(x, weights, prefix):
    return F.conv2d(F.pad(x, (1, 1, 1, 1)), weights(prefix), weights.bias(prefix))


def group_norm(x, weights, prefix, groups):
    batch, channels, height, width = x.shape
    g = x.reshape(batch, groups, -1)
    g = (g - g.mean(-1, keepdim=True)) / torch.sqrt(g.var(-1, keepdim=True, unbiased=False) + 1e-5)
    x = g.reshape(batch, channels, height, width)
    return x * weights.state[f"{prefix}.weight"][:, None, None] + weights.state[f"{prefix}.bias"][:, None, None]


def shuffle(x):
    """Channel 4 c + 2 i + j becomes channel c at row offset i and column offset j."""
    batch, channels, height, width = x.shape
    out = torch.zeros(batch, channels // 4, 2 * height, 2 * width, dtype=x.dtype)
    for i in range(2):
        for j in range(2):
            out[:, :, i::2, j::2] = x[:, 2 * i + j :: 4]
    return out


def up_block(x, weights, prefix, upsample, groups):
    if upsample == "pixel_shuffle":
        y = shuffle(conv(x, weights, f"{prefix}.up"))
        y = y + conv(y, weights, f"{prefix}.sharp")
    else:
        y = F.conv_transpose2d(x, weights(f"{prefix}.up", 1), weights.bias(f"{prefix}.up"), stride=2)
    z = y
    for i in range(2):
        z = group_norm(conv(z, weights, f"{prefix}.refine.convs.{i}"), weights, f"{prefix}.refine.norms.{i}", groups)
        z = z * torch.sigmoid(z)
    return y + z


def head(x, weights, prefix, upsample):
    if upsample == "pixel_shuffle":
        return conv(shuffle(conv(x, weights, f"{prefix}.up")), weights, f"{prefix}.last")
    return F.conv_transpose2d(x, weights(f"{prefix}.up", 1), weights.bias(f"{prefix}.up"), stride=2, padding=1)


def wxformer(x, state, config, size=None):
    """x (B, C, T, H, W) to (B, C_out, 1, H, W); `state` are the weights by our names, `config` the model's Config."""
    weights = Weights(state)
    height, width = x.shape[-2:]
    x = torch.stack([x[:, c, t] for c in range(x.shape[1]) for t in range(x.shape[2])], dim=1)
    x = pad_image(x, config.padding_conf)
    kept = []
    for stage in range(4):
        kernels, stride = config.cross_embed_kernel_sizes[stage], config.cross_embed_strides[stage]
        x = cross_embed(x, weights, f"stages.{stage}.embed", kernels, stride)
        for layer in range(config.depth[stage]):
            name = f"stages.{stage}.layers.{layer}"
            windows = {"short": config.local_window_size, "long": config.global_window_size[stage]}
            for reach, window in windows.items():
                x = attention(
                    x,
                    weights,
                    f"{name}.{reach}",
                    window,
                    config.dim_head,
                    config.position_index,
                    long=reach == "long",
                )
                x = feed_forward(x, weights, f"{name}.{reach}_ff")
        kept.append(x)
    groups = config.dim[0]
    x = up_block(kept[3], weights, "up1", config.upsample, groups)
    x = up_block(torch.cat([x, kept[2]], 1), weights, "up2", config.upsample, groups)
    x = up_block(torch.cat([x, kept[1]], 1), weights, "up3", config.upsample, groups)
    x = head(torch.cat([x, kept[0]], 1), weights, "head", config.upsample)
    if config.padding_conf.activate:
        (north, south), (west, east) = config.padding_conf.pad_lat, config.padding_conf.pad_lon
        x = x[..., north : x.shape[-2] - south, west : x.shape[-1] - east]
    if config.interp:
        x = F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)
    return x[:, :, None]
