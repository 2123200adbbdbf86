//! Changes of ordered lists: filters and routes.

use prost_reflect::DynamicMessage;

use super::Patch;
use crate::api::envoy_filter::Operation;

/// Applies an operation on a list. `names` tells whether the patch names an element, `takes` finds it. Without a name,
/// insertions are at the ends, and `REPLACE` and `REMOVE` do nothing.
pub(super) fn edit(
    list: &mut Vec<DynamicMessage>,
    patch: &Patch<'_>,
    names: bool,
    takes: impl Fn(&DynamicMessage) -> bool,
) {
    if patch.operation == Operation::Remove {
        if names {
            list.retain(|element| !takes(element));
        }
        return;
    }
    let Some(value) = patch.value() else { return };
    let position = list.iter().position(takes);
    match patch.operation {
        Operation::Add => list.push(value.clone()),
        Operation::InsertFirst => list.insert(0, value.clone()),
        Operation::InsertAfter if !names => list.push(value.clone()),
        Operation::InsertBefore if !names => list.insert(0, value.clone()),
        Operation::InsertAfter => {
            if let Some(position) = position {
                list.insert(position + 1, value.clone());
            }
        }
        Operation::InsertBefore => {
            if let Some(position) = position {
                list.insert(position, value.clone());
            }
        }
        Operation::Replace if names => {
            if let Some(element) = position.and_then(|position| list.get_mut(position)) {
                *element = value.clone();
            }
        }
        _ => {}
    }
}
