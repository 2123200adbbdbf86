//! Fields that could not be decoded, with their places.

use skysail_yaml::join;

use crate::{analysis::Code, validate::Finding};

/// A field that could not be decoded, or is unknown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FieldError {
    pub(crate) code: Code,
    pub(crate) path: Vec<Segment>,
    pub(crate) line: u32,
    pub(crate) message: String,
    pub(crate) remedy: String,
}

impl FieldError {
    pub(super) fn invalid(&self) -> InvalidField {
        // Names in snake case are those of findings in camel case.
        let path = path_text(&self.path).split('.').map(camel_case).collect::<Vec<_>>().join(".");
        InvalidField { path, is_unknown: self.code == Code::UnknownField }
    }
}

/// A field that was left out of an object that is validated nevertheless.
#[derive(Debug)]
pub(super) struct InvalidField {
    /// Path in camel case.
    pub(super) path: String,
    /// The object has another field in its place, which is missing.
    is_unknown: bool,
}

impl InvalidField {
    /// Returns whether an error can be due to the missing value: it is that of a field above, below or in its place, or says
    /// that a field beside it is missing.
    pub(super) fn explains(&self, finding: &Finding) -> bool {
        let within = |inner: &str, outer: &str| {
            let rest = inner.strip_prefix(outer);
            rest.is_some_and(|rest| outer.is_empty() || rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let parent = |path: &'_ str| path.rfind('.').unwrap_or_default();
        let (field, own) = (finding.field.as_str(), self.path.as_str());
        let (beside, outer) = (&field[..parent(field)], &own[..parent(own)]);
        let is_missing =
            matches!(finding.code, Code::MissingField | Code::EmptyField | Code::ExclusiveFields);
        within(field, own)
            || within(own, field)
            || beside == outer && (is_missing || self.is_unknown)
            || self.is_unknown && is_missing && within(field, outer)
    }
}

/// A step of a path into the tree.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Segment {
    Key(String),
    Index(usize),
}

/// Formats a path as `spec.http[0].route[1].weight`.
pub(crate) fn path_text(path: &[Segment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Index(index) => text.push_str(&format!("[{index}]")),
            Segment::Key(key) => text = join(&text, key),
        }
    }
    text
}

/// Returns a name in snake case in camel case.
pub(super) fn camel_case(name: &str) -> String {
    let mut camel = String::with_capacity(name.len());
    let mut follows = false;
    for char in name.chars() {
        match char {
            '_' => follows = true,
            char => camel.push(if std::mem::take(&mut follows) { char.to_ascii_uppercase() } else { char }),
        }
    }
    camel
}
