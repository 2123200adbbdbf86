//! Codes of diagnostics. [`codes`] has the only table of them.
//!
//! A code is stable: it is neither renumbered nor used for another kind of mistake. `docs/analysis.md` is generated
//! from this table and from the examples in `tests/analyze`.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

macro_rules! codes {
    ($($name:ident $id:literal $severity:ident [$($istio:literal),*] $meaning:literal $fix:literal)*) => {
        /// Kind of mistake that a diagnostic reports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $(#[doc = $meaning] $name,)*
        }

        impl Code {
            /// All codes, by number.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the properties of the code.
            pub(super) const fn properties(self) -> &'static CodeProperties {
                match self {
                    $(Self::$name => const { &CodeProperties {
                        id: $id,
                        name: stringify!($name),
                        severity: Severity::$severity,
                        istio: &[$($istio),*],
                        meaning: $meaning,
                        fix: $fix,
                    } },)*
                }
            }
        }
    };
}

mod codes;

pub use codes::Code;

/// Severity of a diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The object, or what the message names, has no effect.
    Error,
    /// The object is applied, but probably not as intended.
    Warning,
    /// No action is needed. Reported so that nothing is ignored silently.
    Info,
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

/// Properties of a code.
struct CodeProperties {
    id: &'static str,
    name: &'static str,
    severity: Severity,
    istio: &'static [&'static str],
    meaning: &'static str,
    fix: &'static str,
}

impl Code {
    /// Returns the code as text, such as `SKY0101`.
    pub const fn id(self) -> &'static str {
        self.properties().id
    }

    /// Returns the name, such as `MissingField`.
    pub const fn name(self) -> &'static str {
        self.properties().name
    }

    /// Returns the severity of its diagnostics.
    pub const fn severity(self) -> Severity {
        self.properties().severity
    }

    /// Returns the codes of the analyzers of `istioctl analyze` that find the same mistake.
    pub const fn istio(self) -> &'static [&'static str] {
        self.properties().istio
    }

    /// Returns what is wrong, in one sentence.
    pub const fn meaning(self) -> &'static str {
        self.properties().meaning
    }

    /// Returns how to correct it.
    pub const fn fix(self) -> &'static str {
        self.properties().fix
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.id())
    }
}

/// Error for a text that is neither the number nor the name of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownCode;

impl FromStr for Code {
    type Err = UnknownCode;

    /// Parses the number or the name of a code, in any case.
    fn from_str(text: &str) -> Result<Self, UnknownCode> {
        let is_it =
            |code: &&Self| code.id().eq_ignore_ascii_case(text) || code.name().eq_ignore_ascii_case(text);
        Self::ALL.iter().find(is_it).copied().ok_or(UnknownCode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_in_order() {
        assert!(Code::ALL.is_sorted_by(|one, other| one.id() < other.id()), "numbers rise, each once");
        for code in Code::ALL {
            assert_eq!(code.id().parse(), Ok(*code));
            assert_eq!(code.name().to_lowercase().parse(), Ok(*code), "each name once");
            assert!(
                code.id().len() == 7 && code.id()[3..].bytes().all(|byte| byte.is_ascii_digit()),
                "{code}"
            );
            assert!(code.meaning().ends_with('.') && code.fix().ends_with('.'), "{code}");
        }
        assert_eq!("SKY9999".parse::<Code>(), Err(UnknownCode));
    }
}
