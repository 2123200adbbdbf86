//! Label selectors of namespaces, in the mesh configuration and in Gateways of Gateway API.

use serde::Deserialize;

use super::Labels;

/// Selector of namespaces by their labels; all conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NamespaceSelector {
    /// Labels and their values.
    pub match_labels: Labels,
    /// Further conditions.
    pub match_expressions: Vec<LabelRequirement>,
}

/// Condition on a label.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LabelRequirement {
    /// Label.
    pub key: String,
    /// Operator.
    pub operator: LabelOperator,
    /// Values; none for the operators that take none.
    #[serde(default)]
    pub values: Vec<String>,
}

/// Operator of a condition on a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum LabelOperator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or is absent.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
}

impl NamespaceSelector {
    /// Returns whether a namespace is selected. `label` returns the value of a label of the namespace.
    pub fn selects<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        let holds = |requirement: &LabelRequirement| {
            let value = label(&requirement.key);
            let is_listed =
                value.is_some_and(|value| requirement.values.iter().any(|listed| listed == value));
            match requirement.operator {
                LabelOperator::In => is_listed,
                LabelOperator::NotIn => !is_listed,
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
            }
        };
        self.match_labels.iter().all(|(key, value)| label(key) == Some(value.as_str()))
            && self.match_expressions.iter().all(holds)
    }
}
