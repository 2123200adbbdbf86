//! Sizes in which a scenario can run: `default`, `tiny`, and others that the scenario names.

use std::{collections::BTreeMap, fmt};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

const DEFAULT: &str = "default";
const TINY: &str = "tiny";
/// Maximum length of a name in bytes.
const MAX_NAME: usize = 16;

/// Sizes of a scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, S>", into = "BTreeMap<String, S>")]
pub(super) struct Sizes<S: Clone> {
    default: S,
    /// A run of a few seconds that checks the scenario itself. Its figures are not meaningful.
    tiny: S,
    /// Further sizes, such as `full` for a bigger machine.
    others: Vec<(SizeName, S)>,
}

/// Name of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) enum SizeName {
    /// The size for figures.
    Default,
    /// A check of the scenario itself in seconds; too short for reliable figures.
    Tiny,
    /// Another size of the scenario.
    Other(OtherSize),
}

/// Name of a size that is neither `default` nor `tiny`: lower-case letters, digits and hyphens, followed by zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OtherSize([u8; MAX_NAME]);

impl SizeName {
    /// Parses a name on the command line or in a file.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let is_allowed = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        match name {
            DEFAULT => Ok(Self::Default),
            TINY => Ok(Self::Tiny),
            _ if (1..=MAX_NAME).contains(&name.len()) && name.as_bytes().iter().all(is_allowed) => {
                let mut bytes = [0; MAX_NAME];
                bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
                Ok(Self::Other(OtherSize(bytes)))
            }
            _ => Err(format!(
                "the name of a size must be 1 to {MAX_NAME} lower-case letters, digits and hyphens, not {name:?}"
            )),
        }
    }

    /// Returns the option of the command line, with a remark; empty for the size `default`.
    pub(super) fn option(self) -> String {
        match self {
            Self::Default => String::new(),
            Self::Tiny => format!(" --size {TINY} (too short for reliable figures)"),
            Self::Other(_) => format!(" --size {self}"),
        }
    }
}

impl fmt::Display for SizeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str(DEFAULT),
            Self::Tiny => f.write_str(TINY),
            // A name has ASCII characters only.
            Self::Other(OtherSize(bytes)) => bytes
                .iter()
                .take_while(|byte| **byte != 0)
                .try_for_each(|byte| write!(f, "{}", char::from(*byte))),
        }
    }
}

impl TryFrom<String> for SizeName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Self::parse(&name)
    }
}

impl From<SizeName> for String {
    fn from(name: SizeName) -> Self {
        name.to_string()
    }
}

impl<S: Clone> Sizes<S> {
    /// Returns the size of this name; the size `default` if there is none.
    pub(super) fn of(&self, name: SizeName) -> &S {
        self.all().find(|(of, _)| *of == name).map_or(&self.default, |(_, size)| size)
    }

    /// Returns all sizes with their names.
    pub(super) fn all(&self) -> impl Iterator<Item = (SizeName, &S)> {
        let others = self.others.iter().map(|(name, size)| (*name, size));
        [(SizeName::Default, &self.default), (SizeName::Tiny, &self.tiny)].into_iter().chain(others)
    }

    /// Fails if the scenario has no size of this name.
    pub(super) fn check(&self, scenario: &str, name: SizeName) -> anyhow::Result<()> {
        let names: Vec<String> = self.all().map(|(of, _)| of.to_string()).collect();
        ensure!(
            self.all().any(|(of, _)| of == name),
            "{scenario}: --size {name}: the scenario has no such size; use {}",
            names.join(", ")
        );
        Ok(())
    }
}

impl<S: Clone> TryFrom<BTreeMap<String, S>> for Sizes<S> {
    type Error = String;

    fn try_from(mut sizes: BTreeMap<String, S>) -> Result<Self, String> {
        let mut of = |name: &str| sizes.remove(name).ok_or_else(|| format!("missing field `{name}`"));
        let (default, tiny) = (of(DEFAULT)?, of(TINY)?);
        let others = sizes.into_iter().map(|(name, size)| Ok((SizeName::parse(&name)?, size)));
        Ok(Self { default, tiny, others: others.collect::<Result<_, String>>()? })
    }
}

impl<S: Clone> From<Sizes<S>> for BTreeMap<String, S> {
    fn from(sizes: Sizes<S>) -> Self {
        sizes.all().map(|(name, size)| (name.to_string(), size.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_may_have_further_sizes() {
        let text = r#"{"default":1,"full":3,"tiny":2}"#;
        let sizes: Sizes<u32> = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&sizes).unwrap(), text);
        let full = SizeName::parse("full").unwrap();
        assert_eq!([SizeName::Default, SizeName::Tiny, full].map(|name| *sizes.of(name)), [1, 2, 3]);
        assert_eq!((full.to_string(), full.option()), ("full".to_owned(), " --size full".to_owned()));
        assert_eq!(serde_json::from_str::<SizeName>("\"full\"").unwrap(), full);
        sizes.check("x", full).unwrap();
        let missing = sizes.check("x", SizeName::parse("huge").unwrap()).unwrap_err().to_string();
        assert_eq!(missing, "x: --size huge: the scenario has no such size; use default, tiny, full");
    }

    #[test]
    fn a_size_that_is_missing_or_has_an_invalid_name_is_refused() {
        for (text, error) in [
            (r#"{"default":1}"#, "missing field `tiny`"),
            (r#"{"default":1,"tiny":2,"Full":3}"#, "the name of a size must be"),
            (r#"{"default":1,"tiny":2,"a-name-that-is-too-long":3}"#, "the name of a size must be"),
        ] {
            let got = serde_json::from_str::<Sizes<u32>>(text).unwrap_err().to_string();
            assert!(got.contains(error), "{got}");
        }
    }
}
