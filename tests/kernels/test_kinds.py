"""What is kept of the kinds of weights beyond the code that reads them."""

from prolepsis.kernels.kinds import KINDS


def test_the_order_is_the_one_that_fingerprints_of_twins_know() -> None:
    known = """
        Q4_0 Q4_1 Q8_0 Q6_K F16 BF16 F32 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K IQ4_NL IQ4_XS MXFP4
        IQ3_XXS IQ3_S IQ2_32 IQ2_16 IQ1_32 IQ1_16 INT2 INT3 INT4 INT5 INT6 INT8
    """
    assert list(KINDS) == known.split()
