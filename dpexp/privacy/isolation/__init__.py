"""Nothing that training_step leaves behind reaches another record, another round, or anybody's eyes.

Training data is seen in one place alone, `training_step`; hooks are given a sealed sample (see `delivery`). What a step
could leave there is set back: attributes, containers, buffers, random number generators; what it logs is dropped. Where
nothing can be set back, as in a parameter, it is refused. What neither the module nor its Trainer leads to, such as a
global variable or a file, is out of reach.
"""
