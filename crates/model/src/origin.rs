//! File and line of an object.

use std::{collections::BTreeMap, sync::Arc};

/// Line of each field, by path (`spec.http[0].route[1].weight`).
pub type Lines = BTreeMap<String, u32>;

/// File and line of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// File name.
    pub file: Arc<str>,
    /// First line of the object's document.
    pub line: u32,
    /// Lines of its fields; kept only for kinds that are checked against other objects.
    pub lines: Option<Arc<Lines>>,
    /// Fingerprint of the content without lines and comments, but with fields that the object does not keep.
    pub content: u64,
    /// Generation that a cluster gives it (`metadata.generation`); 0: none.
    pub generation: i64,
}

impl Origin {
    /// Returns the line of a field, or of the nearest enclosing field with a known line.
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
