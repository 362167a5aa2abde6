"""Parameters of a computation, as they stand in request bodies."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_UINT32 = 2**32 - 1

HybridOutput = Literal["dense", "sparse", "colbert"]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Body(BaseModel):
    """Base of request bodies and their parts. Unknown fields are ignored, because clients send more than they need."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Chunking(Body):
    """Cut each text into chunks of `size` tokens, of which `overlap` are the chunk's before.

    `pooling` none: a vector of each chunk, as if it were a text; mean: their mean, weighted by tokens; late: the whole text goes
    through the model once, and each chunk's tokens are pooled.
    """

    size: Annotated[int, Field(ge=1, le=MAX_UINT32)]
    overlap: Annotated[int, Field(ge=0, le=MAX_UINT32)] = 0
    pooling: Literal["none", "mean", "late"] = "none"

    @model_validator(mode="after")
    def _makes_progress(self) -> "Chunking":
        if self.overlap >= self.size:
            raise ValueError(f"`overlap` is {self.overlap}, it must be less than `size`, {self.size}")
        return self


class HybridWeights(Body):
    """What each score of a model of several counts."""

    dense: Weight = 1.0
    sparse: Weight = 0.3
    colbert: Weight = 1.0
