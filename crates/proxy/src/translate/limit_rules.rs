//! Translates the rules that make rate limit descriptors. Source: `envoy.config.route.v3.RateLimit`.

use skysail_xds::envoy::pb::envoy::{
    config::route::v3::{
        RateLimit,
        rate_limit::{
            Action, HitsAddend, Override, XRateLimitOption,
            action::{ActionSpecifier, meta_data::Source},
            r#override::OverrideSpecifier,
        },
    },
    r#type::metadata::v3::{MetadataKey, metadata_key::path_segment::Segment},
};

use super::{At as _, Reject, Result, flag, number, text};
use skysail_policy::config::limit::{Hits, LimitAction, LimitRule, ValueSource};

/// Highest stage number. Source: the validation rule of the field.
const MAX_STAGE: u32 = 10;

/// Translates rules.
pub(super) fn translate(protos: &[RateLimit]) -> Result<Vec<LimitRule>> {
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, proto)| rule(proto).at(format_args!("rate_limits[{index}]"))).collect()
}

/// Translates the rules of a filter: all of them have its stage.
pub(super) fn of_filter(protos: &[RateLimit], stage: u32) -> Result<Option<Vec<LimitRule>>> {
    let mut rules = translate(protos)?;
    for rule in &mut rules {
        rule.stage = stage;
    }
    Ok(Some(rules).filter(|rules| !rules.is_empty()))
}

/// Returns a valid stage number.
pub(super) fn stage(stage: u32) -> Result<u32> {
    if stage > MAX_STAGE {
        return Err(Reject::new(format!("{stage} is not between 0 and {MAX_STAGE}")).at_field("stage"));
    }
    Ok(stage)
}

fn rule(proto: &RateLimit) -> Result<LimitRule> {
    if proto.apply_on_stream_done {
        return Err(Reject::new("is not supported").at_field("apply_on_stream_done"));
    }
    let actions = proto.actions.iter().enumerate();
    let actions: Vec<_> = actions
        .map(|(index, proto)| action(proto).at(format_args!("actions[{index}]")))
        .collect::<Result<_>>()?;
    if actions.is_empty() {
        return Err(Reject::new("must not be empty").at_field("actions"));
    }
    Ok(LimitRule {
        stage: stage(number(proto.stage).unwrap_or(0))?,
        actions,
        hits: proto.hits_addend.as_ref().map(hits).transpose().at("hits_addend")?,
        limit: proto.limit.as_ref().map(limit).transpose().at("limit")?,
        report: match proto.x_ratelimit_option() {
            XRateLimitOption::Unspecified => None,
            XRateLimitOption::Off => Some(false),
            XRateLimitOption::DraftVersion03 => Some(true),
        },
    })
}

fn hits(proto: &HitsAddend) -> Result<Hits> {
    match (&proto.number, proto.format.as_str()) {
        (Some(number), "") => Ok(Hits::Number(number.value)),
        (None, format) if !format.is_empty() => Ok(Hits::Format(text::format(format).at("format")?)),
        _ => Err(Reject::new("needs either a number or a format")),
    }
}

fn limit(proto: &Override) -> Result<Vec<Box<str>>> {
    match &proto.override_specifier {
        Some(OverrideSpecifier::DynamicMetadata(found)) => metadata_path(found.metadata_key.as_ref()),
        _ => Err(Reject::new("must be a dynamic_metadata")),
    }
}

/// Returns the path of a metadata value, which begins with the name of the filter.
fn metadata_path(proto: Option<&MetadataKey>) -> Result<Vec<Box<str>>> {
    let proto = proto.ok_or_else(|| Reject::new("must be given").at_field("metadata_key"))?;
    let keys = proto.path.iter().map(|segment| match &segment.segment {
        Some(Segment::Key(key)) => Ok(key.as_str().into()),
        _ => Err(Reject::new("every segment must be a key").at_field("metadata_key.path")),
    });
    std::iter::once(Ok(proto.key.as_str().into())).chain(keys).collect()
}

#[expect(deprecated, reason = "older configuration has dynamic_metadata")]
fn action(proto: &Action) -> Result<LimitAction> {
    let key = |key: &str, default: &str| if key.is_empty() { default } else { key }.into();
    let value = |key: &str, from, skip_if_absent| match key {
        "" => Err(Reject::new("must be given").at_field("descriptor_key")),
        key => Ok(LimitAction::Value { key: key.into(), from, skip_if_absent }),
    };
    let metadata = |path: Option<&MetadataKey>, default: &str| {
        Ok(ValueSource::Metadata(metadata_path(path)?, default.into()))
    };
    let prefix = |length, max: u8| match number(length) {
        None => Ok(max),
        Some(length) => u8::try_from(length)
            .ok()
            .filter(|length| *length <= max)
            .ok_or_else(|| Reject::new(format!("{length} is above {max}"))),
    };
    Ok(match proto.action_specifier.as_ref() {
        Some(ActionSpecifier::SourceCluster(_)) => LimitAction::SourceCluster,
        Some(ActionSpecifier::DestinationCluster(_)) => LimitAction::DestinationCluster,
        Some(ActionSpecifier::RemoteAddress(_)) => LimitAction::RemoteAddress,
        Some(ActionSpecifier::MaskedRemoteAddress(masks)) => LimitAction::MaskedRemoteAddress {
            v4: prefix(masks.v4_prefix_mask_len, 32).at("masked_remote_address.v4_prefix_mask_len")?,
            v6: prefix(masks.v6_prefix_mask_len, 128).at("masked_remote_address.v6_prefix_mask_len")?,
        },
        Some(ActionSpecifier::GenericKey(constant)) => LimitAction::Constant {
            key: key(&constant.descriptor_key, "generic_key"),
            value: constant.descriptor_value.as_str().into(),
        },
        Some(ActionSpecifier::RequestHeaders(header)) => {
            let from = ValueSource::Header(header.header_name.to_ascii_lowercase().into());
            value(&header.descriptor_key, from, header.skip_if_absent).at("request_headers")?
        }
        Some(ActionSpecifier::QueryParameters(query)) => {
            let from = ValueSource::Query(query.query_parameter_name.as_str().into());
            value(&query.descriptor_key, from, query.skip_if_absent).at("query_parameters")?
        }
        Some(ActionSpecifier::HeaderValueMatch(test)) => LimitAction::Match {
            key: key(&test.descriptor_key, "header_match"),
            value: test.descriptor_value.as_str().into(),
            expected: flag(test.expect_match).unwrap_or(true),
            headers: text::headers(&test.headers).at("header_value_match")?,
            query: Vec::new(),
        },
        Some(ActionSpecifier::QueryParameterValueMatch(test)) => LimitAction::Match {
            key: key(&test.descriptor_key, "query_match"),
            value: test.descriptor_value.as_str().into(),
            expected: flag(test.expect_match).unwrap_or(true),
            headers: Vec::new(),
            query: test
                .query_parameters
                .iter()
                .map(text::query)
                .collect::<Result<_>>()
                .at("query_parameter_value_match.query_parameters")?,
        },
        Some(ActionSpecifier::DynamicMetadata(found)) => {
            let from = metadata(found.metadata_key.as_ref(), &found.default_value).at("dynamic_metadata")?;
            value(&found.descriptor_key, from, false).at("dynamic_metadata")?
        }
        Some(ActionSpecifier::Metadata(found)) => {
            if found.source() != Source::Dynamic {
                return Err(Reject::new("only DYNAMIC is supported").at_field("metadata.source"));
            }
            let from = metadata(found.metadata_key.as_ref(), &found.default_value).at("metadata")?;
            value(&found.descriptor_key, from, found.skip_if_absent).at("metadata")?
        }
        Some(ActionSpecifier::Extension(_) | ActionSpecifier::RemoteAddressMatch(_)) | None => {
            return Err(Reject::new("this action is not supported"));
        }
    })
}
