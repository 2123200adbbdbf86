//! What we tell people about their configuration: where, which object, which field, what is wrong, what to do.

use std::fmt;

use serde::Serialize;

use crate::api::ObjectKey;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object, or what the message names, has no effect.
    Error,
    /// The object is applied, but probably does not do what was meant.
    Warning,
    /// Nothing to do; said so that nothing is ignored in silence.
    Info,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Diagnostic {
    /// The file it was read from; a name for what came from elsewhere.
    pub file: String,
    /// The line in the file, from 1; 0 if unknown.
    pub line: u32,
    /// How bad it is.
    pub severity: Severity,
    /// `VirtualService default/reviews`; empty where no object could be made out.
    pub object: String,
    /// `spec.http[0].route[1].weight`; empty for the object as a whole.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What to do; may be empty.
    pub remedy: String,
}

impl Diagnostic {
    /// A finding without field and remedy.
    pub fn new(severity: Severity, file: &str, line: u32, message: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            line,
            severity,
            object: String::new(),
            field: String::new(),
            message: message.into(),
            remedy: String::new(),
        }
    }

    /// Names the object.
    #[must_use]
    pub fn object(mut self, key: &ObjectKey) -> Self {
        self.object = key.to_string();
        self
    }

    /// Names the field.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }

    /// Says what to do.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
        })
    }
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
        Ok(())
    }
}
