"""What the tests of this repository stand on."""
