"""Parameters of a computation that request bodies contain."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_UINT32 = 2**32 - 1

HybridOutput = Literal["dense", "sparse", "colbert"]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Body(BaseModel):
    """Base of request bodies and their parts. Unknown fields are ignored, because many clients send additional fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Chunking(Body):
    """Cut each text into chunks of `size` tokens. A chunk starts with the last `overlap` tokens of the chunk before it.

    `pooling` none gives a vector for each chunk, computed as if the chunk were a text. mean gives one vector for each text: the
    mean of the chunks' vectors, weighted by tokens. late computes the whole text in one pass, and pools the tokens of each chunk.
    """

    size: Annotated[int, Field(ge=1, le=MAX_UINT32)]
    overlap: Annotated[int, Field(ge=0, le=MAX_UINT32)] = 0
    pooling: Literal["none", "mean", "late"] = "none"

    @model_validator(mode="after")
    def _makes_progress(self) -> "Chunking":
        if self.overlap >= self.size:
            raise ValueError(f"`overlap` is {self.overlap}, but it must be less than `size`, {self.size}")
        return self


class HybridWeights(Body):
    """The weight of each score, for a model with several scores."""

    dense: Weight = 1.0
    sparse: Weight = 0.3
    colbert: Weight = 1.0
