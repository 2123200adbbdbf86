//! Changes of ordered lists: filters and routes.

use prost_reflect::DynamicMessage;

use super::ApplicablePatch;
use crate::api::envoy_filter::PatchOperation;

/// Applies an operation on a list. `names` tells whether the patch names an element, `takes` finds it. Without a name,
/// insertions are at the ends, and `REPLACE` and `REMOVE` do nothing.
pub(super) fn edit(
    list: &mut Vec<DynamicMessage>,
    patch: &ApplicablePatch<'_>,
    names: bool,
    takes: impl Fn(&DynamicMessage) -> bool,
) {
    if patch.operation == PatchOperation::Remove {
        if names {
            list.retain(|element| !takes(element));
        }
        return;
    }
    let Some(value) = patch.value() else { return };
    let position = list.iter().position(takes);
    match patch.operation {
        PatchOperation::Add => list.push(value.clone()),
        PatchOperation::InsertFirst => list.insert(0, value.clone()),
        PatchOperation::InsertAfter if !names => list.push(value.clone()),
        PatchOperation::InsertBefore if !names => list.insert(0, value.clone()),
        PatchOperation::InsertAfter => {
            if let Some(position) = position {
                list.insert(position + 1, value.clone());
            }
        }
        PatchOperation::InsertBefore => {
            if let Some(position) = position {
                list.insert(position, value.clone());
            }
        }
        PatchOperation::Replace if names => {
            if let Some(element) = position.and_then(|position| list.get_mut(position)) {
                *element = value.clone();
            }
        }
        _ => {}
    }
}
