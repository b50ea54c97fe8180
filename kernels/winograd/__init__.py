"""What all operations by Winograd's algorithm share: its rules, and the transforms of 4x4 tiles of a tensor."""
