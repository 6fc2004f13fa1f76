"""`linear/1` in plain Python, written from docs/format.md alone, as `spec_decoder` is."""

import json
import math

import numpy as np
import xxhash
from spec_decoder import Steps, Stream, angles, f32, float_bits, guesses_of, profile, universal

_TYPES = {"F32": np.float32, "I8": np.int8, "U8": np.uint8, "U16": np.uint16}


def safetensors(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """(metadata, tensors)."""
    size = int.from_bytes(data[:8], "little")
    head, body, tensors = json.loads(data[8 : 8 + size]), data[8 + size :], {}
    for name, entry in head.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(body[begin:end], _TYPES[entry["dtype"]]).reshape(entry["shape"])
    return head["__metadata__"], tensors


def number(scalar: int, dtype: str) -> float:
    """The value of a scalar, in steps where it is an integer; NaN and infinities are 0, and nothing is beyond 2^99."""
    size = scalar & 0x7FFF
    if dtype in ("int8", "int4"):
        return -1.0 - size if scalar >> 15 else float(size)
    exponent_bits, m, bias = {"bf16": (8, 7, 127), "fp16": (5, 10, 15), "fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15)}[
        dtype
    ]
    exponent, mantissa = size >> m, size % (1 << m)
    special = size == 0x7F if dtype == "fp8_e4m3" else exponent == (1 << exponent_bits) - 1
    value = math.ldexp(mantissa + (exponent > 0) * 2.0**m, max(exponent, 1) - bias - m)
    value = 0.0 if special else min(value, 2.0**99)
    return -value if scalar >> 15 else value


def nearest(x: np.ndarray, limit: int) -> np.ndarray:
    return np.rint(np.clip(x, -limit, limit)).astype(np.int64)


class Linear:
    """What `Static` is, for `linear/1`. embedding: float32 [vocabulary, hidden]."""

    def __init__(self, header: dict, profile_file: bytes, embedding: np.ndarray) -> None:
        metadata, self.tensors = safetensors(profile_file)
        self.header, self.embedding, about = header, embedding, json.loads(metadata["prolepsis"])
        assert about["fingerprint"] == header["profile_fingerprint"] == fingerprint(about, self.tensors)
        assert [about[k] for k in ("dtype", "layers", "kv_heads", "head_dim")] == [
            header[k] for k in ("dtype", "layers", "kv_heads", "head_dim")
        ]
        self.channels, self.groups = self.chain_order()
        self.tables = universal(header["dtype"])
        if header["dtype"] in ("int8", "int4"):
            static = profile(header, self.tensors["static"].tobytes())
            self.beside = [Steps(*one) for one in static.beside]

    def chain_order(self) -> tuple[list[tuple[int, int, int]], list[int | None]]:
        """((kind, head, channel) of each channel, first turned pair of each group)."""
        heads, dim, rope = self.header["kv_heads"], self.header["head_dim"], self.header["rope"]
        turned = 0 if rope is None else rope["dim"]
        channels, groups = [], []
        for kind in (0, 1):
            for head in range(heads):
                for at in range(0, dim, 16):
                    pairs = range(at // 2, at // 2 + 8)
                    if kind == 1 or at >= turned:
                        own = list(range(at, at + 16))
                    elif rope["style"] == "interleaved":
                        own = [2 * i for i in pairs] + [2 * i + 1 for i in pairs]
                    else:
                        own = list(pairs) + [i + turned // 2 for i in pairs]
                    channels += [(kind, head, c) for c in own]
                    groups.append(None if kind == 1 or at >= turned else at // 2)
        return channels, groups

    def begin(self, start: int, ids: list[int]) -> None:
        """Of a segment."""
        self.start, self.ids, self.layer = start, ids, -1
        self.below: list[np.ndarray] = []

    def token_features(self) -> tuple[np.ndarray, np.ndarray]:
        """(upper, lower) bytes, int64 [tokens, columns]."""
        known = self.tensors
        upper = np.zeros((len(self.ids), known["token.upper.weights"].shape[2]), np.int64)
        lower = np.zeros_like(upper)
        for t, token in enumerate(self.ids):
            row = [float(x) for x in self.embedding[token]]
            square = 0.0
            for x in row:
                square += x * x
            root = math.sqrt(square / len(row) + float(known["token.epsilon"][0]))
            normed = np.array([f32(x / root) for x in row])
            features = nearest((normed - known["token.means"]) * known["token.inverses"], 32512)
            upper[t, : len(row)] = (features + 128) >> 8
            lower[t, : len(row)] = features - 256 * upper[t, : len(row)]
        return upper, lower

    def begin_layer(self, layer: int, tokens: int) -> None:
        known = self.tensors
        self.layer = layer
        self.guess = np.repeat(known["base"][layer][None], tokens, axis=0)
        terms = []
        if "token.means" in known and layer < 3:
            upper, lower = self.token_features()
            weights, steps = known["token.upper.weights"][layer], known["token.upper.steps"][layer]
            terms.append((weights, steps, upper))
            if layer == 0:
                terms.append((weights, steps / f32(256), lower))
                terms.append((known["token.rest.weights"][0], known["token.rest.steps"][0], upper))
        for down, name in ((1, "below"), (2, "below2")):
            if layer >= down:
                matrices = known[f"{name}.weights"], known[f"{name}.steps"]
                terms.append((matrices[0][layer - down], matrices[1][layer - down], self.below[-down]))
        for weights, steps, features in terms:
            self.guess = self.guess + steps * (features @ weights.T.astype(np.int64)).astype(f32)
        self.features = np.zeros((tokens, 0), np.int64)
        self.energy = [0] * tokens

    def read(
        self, data: bytes, layer: int, kind: int, first: int, steps: np.ndarray | None, shape: tuple
    ) -> np.ndarray:
        """As `Static.read`."""
        tokens, heads, dim = shape
        if layer != self.layer:
            self.begin_layer(layer, tokens)
        stream = Stream(data, tokens * heads * dim, self.header["dtype"], self.tables)
        out = np.zeros(shape, np.uint16)
        begin = (kind * self.header["kv_heads"] + first) * dim // 16
        for g in range(begin, begin + heads * dim // 16):
            for t, scalars in enumerate(self.read_group(stream, g, None if steps is None else steps[kind])):
                for scalar, (_, head, channel) in zip(scalars, self.channels[16 * g : 16 * g + 16], strict=True):
                    out[t, head - first, channel] = scalar
        stream.end()
        if begin + heads * dim // 16 == len(self.groups):
            self.below.append(self.features)
        return out

    def read_group(self, stream: Stream, g: int, steps: np.ndarray | None) -> list[list[int]]:
        """The scalars of each token."""
        known, layer, part = self.tensors, self.layer, slice(16 * g, 16 * g + 16)
        at = 256 * g * (g - 1) // 2
        weights = known["chain"][layer][at : at + 256 * g].reshape(16, 16 * g).astype(np.int64)
        guess = self.guess[:, part] + known["chain_steps"][layer][part] * (self.features @ weights.T).astype(f32)
        codes, head = known["codes"][layer][part].tolist(), self.channels[16 * g][1]
        out, features = [], []
        for t, own in enumerate(guess):
            prediction = self.turned(own, g, t, 1)
            moved = self.shift(g, t)
            step = None if steps is None else steps[t, head].view(np.float16)
            scalars = stream.read(guesses_of(prediction.tolist(), codes, step, moved))
            values = np.array([number(s, self.header["dtype"]) for s in scalars], f32)
            if step is not None:
                values = values * (f32(step) if np.isfinite(step) else f32(0))
            x = self.turned(values, g, t, -1)
            means, inverses, errors = (known[name][layer][part] for name in ("means", "inverses", "errors"))
            features.append(nearest((x - means) * inverses, 127))
            self.energy[t] += int((nearest((x - own) * errors * f32(8), 1023) ** 2).sum())
            out.append(scalars)
        self.features = np.concatenate([self.features, np.array(features)], axis=1)
        return out

    def turned(self, values: np.ndarray, g: int, t: int, direction: int) -> np.ndarray:
        """A token's values of group g, by its position's angles or (direction -1) back."""
        pair = self.groups[g]
        if pair is None:
            return values
        by = angles(self.header["rope"], self.start + t)[pair : pair + 8]
        cos, sin = np.array([c for c, _ in by]), f32(direction) * np.array([s for _, s in by])
        a, b = values[:8], values[8:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos])

    def shift(self, g: int, t: int) -> int:
        ratio = f32(self.energy[t] + 256) / f32(64 * (16 * g + 4))
        e = ((float_bits(ratio) + 2**19) >> 20) - 1016
        return min(max((e + 1) >> 1, -64), 64)


def fingerprint(about: dict, tensors: dict[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128(f"{about['vocabulary']} {about['embedding']}".encode())
    for name in sorted(tensors.keys() - {"static"}):
        digest.update(tensors[name].tobytes())
    digest.update(tensors["static"].tobytes() if "static" in tensors else b"")
    return digest.hexdigest()
