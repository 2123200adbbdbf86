//! What a bootstrap file may hold.
