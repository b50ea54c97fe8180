"""Tests of `verify/`: honest results pass, wrong ones are found, and the report says what is wrong."""
