//! `layered_runtime`: numbers that are for the whole process.

use std::time::Duration;

use anyhow::{Context as _, bail};
use skysail_xds::envoy::pb::{
    envoy::config::bootstrap::v3::{LayeredRuntime, runtime_layer::LayerSpecifier},
    google::protobuf::{Struct, Value, value::Kind},
};

use crate::overload::Limits;

/// The limits that the layers set, the last of them first. Keys that mean something to Envoy alone are passed over, as
/// Istio sends many with every sidecar.
pub(super) fn limits(runtime: &LayeredRuntime) -> anyhow::Result<Limits> {
    let mut limits = Limits::default();
    for layer in &runtime.layers {
        let Some(LayerSpecifier::StaticLayer(values)) = &layer.layer_specifier else { continue };
        let mut numbers = Vec::new();
        flatten("", values, &mut numbers);
        for (key, value) in numbers {
            let number = || number(value).with_context(|| format!("{}: {key}", layer.name));
            let millis = || number().map(|number| Duration::from_millis(number.into()));
            match key.as_str() {
                "overload.premature_reset_total_stream_count" => limits.resets = number()?,
                "skysail.overload.under_way" => limits.under_way = number()?,
                "skysail.overload.late_ms" => limits.late = millis()?,
                "skysail.overload.refuse_ms" => limits.overloaded = millis()?,
                own if own.starts_with("skysail.") => bail!(
                    "{}: there is no {own}: use skysail.overload.under_way, .late_ms or .refuse_ms",
                    layer.name
                ),
                _ => {}
            }
        }
    }
    Ok(limits)
}

/// All values with their keys; those of an object within another are under both keys with a dot between them.
fn flatten<'a>(prefix: &str, values: &'a Struct, all: &mut Vec<(String, &'a Value)>) {
    for (key, value) in &values.fields {
        let key = format!("{prefix}{key}");
        match &value.kind {
            Some(Kind::StructValue(inner)) => flatten(&format!("{key}."), inner, all),
            _ => all.push((key, value)),
        }
    }
}

/// A number, which may be written as a text.
fn number(value: &Value) -> anyhow::Result<u32> {
    let text = match &value.kind {
        Some(Kind::NumberValue(number)) => number.to_string(),
        Some(Kind::StringValue(text)) => text.clone(),
        _ => bail!("must be a number"),
    };
    text.parse().with_context(|| format!("{text:?} is not a whole number from 0 to {}", u32::MAX))
}
