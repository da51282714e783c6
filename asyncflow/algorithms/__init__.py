"""What is optimised: pure functions on tensors, one file for each idea.

Nothing under a mask may influence a loss or its gradient, whatever its value; denominators are those of the
whole optimizer step; groups are found by id. `options` and `report` are free of torch.
"""
