"""Which combinations of algorithm, shape, page size and cache type run, on a real server and in one process."""

from __future__ import annotations

from dataclasses import dataclass

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
SHAPES = ("chain", "tree")
PAGE_SIZES = (1, 16, 64)
#: Of the servers; a CPU server refuses FP8 caches.
DTYPES = ("float32", "bfloat16")
#: The last two are caches under a bfloat16 model.
IN_PROCESS_DTYPES = (*DTYPES, "float16", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Case:
    """One speculative server. `draft` is a kind of `sglang_specverify.demo.models.build`, None for NGRAM."""

    algorithm: str
    shape: str
    page_size: int
    dtype: str
    draft: str | None

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.shape}-page{self.page_size}-{self.dtype}"

    @property
    def key(self) -> tuple[str, str, int, str]:
        return (self.algorithm, self.shape, self.page_size, self.dtype)

    def arguments(self, draft_path: str | None) -> list[str]:
        """SGLang's arguments, but for the target model."""
        common = ["--page-size", str(self.page_size), "--dtype", self.dtype, "--speculative-algorithm", self.algorithm]
        if self.algorithm == "NGRAM":
            breadth = "1" if self.shape == "chain" else "4"
            return [*common, "--speculative-num-draft-tokens", "8", "--speculative-ngram-max-bfs-breadth", breadth]
        topk, drafts = ("1", "4") if self.shape == "chain" else ("4", "8")
        return [
            *common,
            *("--speculative-draft-model-path", str(draft_path), "--speculative-num-steps", "3"),
            *("--speculative-eagle-topk", topk, "--speculative-num-draft-tokens", drafts),
        ]


#: The first serves the fault controls too. SGLang serves NGRAM trees at page size 1 alone.
CASES = (
    Case("STANDALONE", "tree", 1, "float32", "mirror"),
    Case("STANDALONE", "chain", 16, "bfloat16", "copy"),
    Case("EAGLE", "tree", 16, "float32", "eagle"),
    Case("EAGLE", "chain", 64, "bfloat16", "eagle"),
    Case("EAGLE3", "tree", 64, "bfloat16", "eagle3"),
    Case("EAGLE3", "chain", 1, "float32", "eagle3"),
    Case("NGRAM", "tree", 1, "bfloat16", None),
    Case("NGRAM", "chain", 64, "float32", None),
)

#: Everything that SGLang serves at all, through the real backend classes, pools and batches (`tests/backends`).
IN_PROCESS = tuple(
    (algorithm, shape, page_size, dtype)
    for algorithm in ALGORITHMS
    for shape in SHAPES
    for page_size in PAGE_SIZES
    for dtype in IN_PROCESS_DTYPES
    if not (algorithm == "NGRAM" and shape == "tree" and page_size > 1)
)
