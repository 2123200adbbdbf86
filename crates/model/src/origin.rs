//! Where an object was read.

use std::{collections::BTreeMap, sync::Arc};

/// The line of each field, by path (`spec.http[0].route[1].weight`).
pub type Lines = BTreeMap<String, u32>;

/// Where an object was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The file.
    pub file: Arc<str>,
    /// The line its document starts at.
    pub line: u32,
    /// The lines of its fields; kept for the kinds that are checked against others.
    pub lines: Option<Arc<Lines>>,
    /// Fingerprint of what is written, fields included that the object does not keep.
    pub content: u64,
}

impl Origin {
    /// The line of a field, or of the nearest field around it that has one.
    pub fn line_of(&self, field: &str) -> u32 {
        let Some(lines) = &self.lines else { return self.line };
        let mut path = field;
        loop {
            if let Some(line) = lines.get(path) {
                return *line;
            }
            let Some(end) = path.rfind(['.', '[']) else { return self.line };
            path = &path[..end];
        }
    }
}
