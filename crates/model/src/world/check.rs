//! What does not fit together: checks over several objects. Nothing is taken out for it; as in Istio, a route to a
//! host or subset that is not there answers 503 until it is.

use super::World;
use crate::diagnostic::Diagnostic;

impl World {
    /// Reports what does not fit together, by file and line.
    pub fn validate(&self) -> Vec<Diagnostic> {
        Vec::new()
    }
}
