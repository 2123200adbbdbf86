//! What people write, checked and indexed, and its compilation to xDS
