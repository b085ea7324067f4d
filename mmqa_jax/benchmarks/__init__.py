"""The question-answering benchmarks: a file each, which reads, scores and submits it."""

# A benchmark's name is that of its file here.
NAMES = (
    *("vqav2", "okvqa", "aokvqa", "scienceqa", "mmbench", "seedbench", "multimodalqa"),
    *("infoseek", "evqa", "mbeir", "vidore", "mmmu", "mragbench", "mathvista"),
    *("bright", "mmlongbench", "citevqa", "dynvqa", "mmsearch", "fvqa", "livevqa", "mmeb"),
)
