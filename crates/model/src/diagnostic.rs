//! Diagnostics about configuration: file, line, object, field, error and remedy.

use std::fmt;

use serde::Serialize;

use crate::{analysis::Code, api::ObjectKey};

pub use crate::analysis::Severity;

/// Maximum length of a message or a remedy, in bytes.
const MAX_TEXT: usize = 1_024;

/// One diagnostic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Diagnostic {
    /// File name, or another name of the source.
    pub file: String,
    /// Line in the file, from 1; 0 if unknown.
    pub line: u32,
    /// Severity, which follows from the code.
    pub severity: Severity,
    /// Kind of mistake.
    pub code: Code,
    /// Object, as `VirtualService default/reviews`; empty if the object could not be identified.
    pub object: String,
    /// Field, as `spec.http[0].route[1].weight`; empty for the object as a whole.
    pub field: String,
    /// Error message.
    pub message: String,
    /// Remedy; may be empty.
    pub remedy: String,
}

impl Diagnostic {
    /// Creates a diagnostic without field and remedy.
    pub fn new(code: Code, file: &str, line: u32, message: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            line,
            severity: code.severity(),
            code,
            object: String::new(),
            field: String::new(),
            message: cut(message.into()),
            remedy: String::new(),
        }
    }

    /// Sets the object.
    #[must_use]
    pub fn object(mut self, key: &ObjectKey) -> Self {
        self.object = key.to_string();
        self
    }

    /// Sets the field.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }

    /// Sets the remedy.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = cut(remedy.into());
        self
    }
}

/// Cuts a text to its maximum length: it may contain a value of any length.
pub(crate) fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT));
        text.push('…');
    }
    text
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}: ", self.severity)?;
        for part in [&self.object, &self.field] {
            if !part.is_empty() {
                write!(f, "{part}: ")?;
            }
        }
        f.write_str(&self.message)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        write!(f, " [{}]", self.code)
    }
}
