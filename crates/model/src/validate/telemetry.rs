//! Validation of Telemetry.

use std::time::Duration;

use super::{Code, Finding, Findings, formats, header_name, percent, positive, security};
use crate::api::{
    Telemetry,
    telemetry::{Metric, MetricSelector, Metrics, ProviderRef, TagOperation, Tracing},
};

/// Minimum interval at which `skysail-proxy` reports the metrics of open connections.
const MIN_REPORTING_INTERVAL: Duration = Duration::from_millis(100);

/// Checks a Telemetry.
pub(crate) fn telemetry(spec: &Telemetry) -> Vec<Finding> {
    let mut findings = Findings::default();
    security::attachment(spec.selector.is_some(), spec.target_ref.as_ref(), &spec.target_refs, &mut findings);
    for (index, one) in spec.tracing.iter().enumerate() {
        tracing(one, &format!("spec.tracing[{index}]"), &mut findings);
    }
    let is_checked = expressions(spec, &mut findings);
    for (index, metrics) in spec.metrics.iter().enumerate() {
        let field = format!("spec.metrics[{index}]");
        providers(&metrics.providers, &field, &mut findings);
        reporting_interval(metrics, &field, &mut findings);
        for (index, one) in metrics.overrides.iter().enumerate() {
            let field = format!("{field}.overrides[{index}]");
            let both = |of: &MetricSelector| of.metric.is_some() && !of.custom_metric.is_empty();
            if one.matched.as_ref().is_some_and(both) {
                let message = "has metric and customMetric";
                findings.add(Code::ExclusiveFields, format!("{field}.match"), message, "remove one of them");
            }
            let is_all = |of: &MetricSelector| of.metric == Some(Metric::AllMetrics);
            let is_empty = one.disabled.is_none() && one.tag_overrides.is_empty();
            if is_empty && !one.matched.as_ref().is_some_and(is_all) {
                findings.add(Code::NoEffect, &field, "changes nothing", "set disabled or tagOverrides");
            }
            for (tag, change) in &one.tag_overrides {
                let field = skysail_yaml::join(&format!("{field}.tagOverrides"), tag);
                match (change.operation, change.value.is_empty()) {
                    (TagOperation::Upsert, true) => {
                        findings.add(
                            Code::MissingField,
                            field,
                            "has no value",
                            "set value, or operation: REMOVE",
                        );
                    }
                    (TagOperation::Remove, false) => {
                        findings.add(
                            Code::ExclusiveFields,
                            field,
                            "has a value, but operation REMOVE takes none",
                            "remove value",
                        );
                    }
                    (TagOperation::Upsert, false) if is_checked => {
                        formats::expression(&change.value, &format!("{field}.value"), &mut findings);
                    }
                    _ => {}
                }
            }
        }
    }
    for (index, log) in spec.access_logging.iter().enumerate() {
        let field = format!("spec.accessLogging[{index}]");
        providers(&log.providers, &field, &mut findings);
        if let Some(filter) = log.filter.as_ref().filter(|_| is_checked) {
            formats::expression(&filter.expression, &format!("{field}.filter.expression"), &mut findings);
        }
    }
    findings.done()
}

/// Counts the CEL expressions. Returns false if there are too many to check.
fn expressions(spec: &Telemetry, findings: &mut Findings) -> bool {
    let tags = spec.metrics.iter().flat_map(|of| &of.overrides).flat_map(|of| of.tag_overrides.values());
    let filters = spec.access_logging.iter().filter(|of| of.filter.is_some());
    let count = tags.filter(|tag| !tag.value.is_empty()).count() + filters.count();
    let is_checked = count <= formats::MAX_EXPRESSIONS;
    if !is_checked {
        let message =
            format!("has {count} CEL expressions, at most {} are allowed", formats::MAX_EXPRESSIONS);
        findings.add(Code::TooMany, "spec", message, "divide it into several objects");
    }
    is_checked
}

fn reporting_interval(metrics: &Metrics, field: &str, findings: &mut Findings) {
    let field = format!("{field}.reportingInterval");
    positive(metrics.reporting_interval, &field, findings);
    let is_short = |interval: Duration| interval.as_millis() > 0 && interval < MIN_REPORTING_INTERVAL;
    if metrics.reporting_interval.is_some_and(|interval| is_short(interval.0)) {
        let message = "is below 100 ms, which skysail-proxy uses instead";
        findings.add(Code::UnsupportedField, field, message, "write 100ms or more");
    }
}

fn providers(list: &[ProviderRef], field: &str, findings: &mut Findings) {
    for (index, _) in list.iter().enumerate().filter(|(_, provider)| provider.name.is_empty()) {
        findings.add(
            Code::MissingField,
            format!("{field}.providers[{index}].name"),
            "is missing",
            "set a provider's name",
        );
    }
}

fn tracing(tracing: &Tracing, field: &str, findings: &mut Findings) {
    providers(&tracing.providers, field, findings);
    if tracing.providers.len() > 1 {
        let message = "only the first provider is used";
        findings.add(Code::NoEffect, format!("{field}.providers"), message, "remove the others");
    }
    if let Some(share) = tracing.random_sampling_percentage {
        percent(share, &format!("{field}.randomSamplingPercentage"), findings);
    }
    for (name, tag) in tracing.custom_tags.iter().flatten() {
        let field = skysail_yaml::join(&format!("{field}.customTags"), name);
        let kinds =
            [tag.literal.is_some(), tag.environment.is_some(), tag.header.is_some(), tag.formatter.is_some()];
        if kinds.iter().filter(|is_set| **is_set).count() != 1 {
            let remedy = "set one of literal, environment, header and formatter";
            findings.add(Code::ExclusiveFields, &field, "must have exactly one kind of value", remedy);
        }
        if name.is_empty() {
            findings.add(Code::MissingField, &field, "has no name", "name the tag");
        }
        if let Some(header) = &tag.header {
            header_name(&header.name, &format!("{field}.header.name"), findings);
        }
        if let Some(formatter) = &tag.formatter {
            formats::tag_value(&formatter.value, &format!("{field}.formatter.value"), findings);
        }
        if tag.environment.as_ref().is_some_and(|of| of.name.is_empty()) {
            findings.add(Code::EmptyField, format!("{field}.environment.name"), "is empty", "set a variable");
        }
    }
}
