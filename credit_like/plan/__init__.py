"""What a training would need, from a simulation of its own step: memory, operations, bytes, and the layout that suits."""
