//! Translates `layered_runtime`: numeric settings of the process.

use std::{collections::HashSet, time::Duration};

use anyhow::{Context as _, bail};
use skysail_xds::envoy::pb::{
    envoy::config::bootstrap::v3::{LayeredRuntime, runtime_layer::LayerSpecifier},
    google::protobuf::{Struct, Value, value::Kind},
};

use crate::overload::Limits;

/// Returns the limits that the layers set; the last layer wins. Keys that only Envoy supports are ignored,
/// because Istio sends many of them to every sidecar.
pub(super) fn limits(runtime: &LayeredRuntime) -> anyhow::Result<Limits> {
    let mut limits = Limits::default();
    let mut names = HashSet::new();
    for layer in &runtime.layers {
        if !names.insert(&layer.name) {
            bail!("two layers have the name {:?}: rename one", layer.name);
        }
        let Some(LayerSpecifier::StaticLayer(values)) = &layer.layer_specifier else { continue };
        let mut numbers = Vec::new();
        flatten("", values, &mut numbers);
        for (key, value) in numbers {
            if key == RESETS || key.starts_with("skysail.") {
                let set =
                    text(value).with_context(|| key.clone()).and_then(|value| set(&mut limits, &key, &value));
                set.with_context(|| layer.name.clone())?;
            }
        }
    }
    Ok(limits)
}

/// Envoy's key of the limit on premature resets.
const RESETS: &str = "overload.premature_reset_total_stream_count";

/// Sets one limit.
///
/// # Errors
/// The key does not exist, or the value is not a number.
pub(crate) fn set(limits: &mut Limits, key: &str, value: &str) -> anyhow::Result<()> {
    let number = || {
        let range = format!("{key}: {value:?} is not a whole number from 0 to {}", u32::MAX);
        value.parse::<u32>().context(range)
    };
    let millis = || number().map(|number| Duration::from_millis(number.into()));
    match key {
        RESETS => limits.resets = number()?,
        "skysail.overload.under_way" => limits.under_way = number()?,
        "skysail.overload.late_ms" => limits.late = millis()?,
        "skysail.overload.refuse_ms" => limits.overloaded = millis()?,
        "skysail.admission.drain_ms" => limits.revoked_drain = millis()?,
        "skysail.admission.end_with_certificate" => limits.end_with_certificate = number()? != 0,
        _ => bail!(
            "there is no {key}: use {RESETS}, skysail.overload.under_way, .late_ms or .refuse_ms, or \
             skysail.admission.drain_ms or .end_with_certificate"
        ),
    }
    Ok(())
}

/// Collects all values with their keys; the keys of nested objects are joined with dots.
fn flatten<'a>(prefix: &str, values: &'a Struct, all: &mut Vec<(String, &'a Value)>) {
    for (key, value) in &values.fields {
        let key = format!("{prefix}{key}");
        match &value.kind {
            Some(Kind::StructValue(inner)) => flatten(&format!("{key}."), inner, all),
            _ => all.push((key, value)),
        }
    }
}

/// Returns keys and values of a layer as strings.
pub(crate) fn entries(values: &Struct) -> impl Iterator<Item = (String, String)> {
    let mut all = Vec::new();
    flatten("", values, &mut all);
    all.into_iter().map(|(key, value)| {
        let text = match &value.kind {
            Some(Kind::NumberValue(number)) => number.to_string(),
            Some(Kind::StringValue(text)) => text.clone(),
            Some(Kind::BoolValue(truth)) => truth.to_string(),
            _ => String::new(),
        };
        (key, text)
    })
}

/// Returns the text of a number, which may be a string.
fn text(value: &Value) -> anyhow::Result<String> {
    match &value.kind {
        Some(Kind::NumberValue(number)) => Ok(number.to_string()),
        Some(Kind::StringValue(text)) => Ok(text.clone()),
        _ => bail!("must be a number"),
    }
}
