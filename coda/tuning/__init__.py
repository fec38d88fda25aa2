"""The tuner: builds a kernel at a dozen tiles, checks and times them on the GPU, and remembers which is best, or that
none beats separate kernels.

    candidates   coda/target/tiles.py: a proven list, each legal for the kernel
    build        in parallel, into the cache of artifacts; what spills is dropped
    measure.py   in a process of its own (child.py): each against float64, then all in interleaved rounds, beside the
                 unfused way (coda/runtime/unfused.py)
    decide.py    times to a choice: the fastest tile, or the decision not to fuse
    choice.py    choices on disk, by program, sizes, device, driver and version
    tune.py      all of this, for every kernel of a program
    use.py       choices where programs are compiled and called
"""
