//! Translates changes of local replies. Source:
//! `envoy.extensions.filters.network.http_connection_manager.v3.LocalReplyConfig`.

use skysail_xds::envoy::pb::envoy::{
    config::core::v3::{
        DataSource, SubstitutionFormatString, data_source::Specifier, substitution_format_string::Format,
    },
    extensions::filters::network::http_connection_manager::v3::{LocalReplyConfig, ResponseMapper},
};

use super::{At as _, Reject, Result, access_log, number, route, route_filters::status_code};
use skysail_policy::config::http::LocalReply;

/// Translates the changes of local replies. Body formats other than `%LOCAL_REPLY_BODY%` are refused.
pub(super) fn translate(proto: Option<&LocalReplyConfig>, strict: bool) -> Result<Vec<LocalReply>> {
    let Some(proto) = proto else { return Ok(Vec::new()) };
    if proto.body_format.is_some() {
        return Err(Reject::new("is not supported").at_field("body_format"));
    }
    let indexed = proto.mappers.iter().enumerate();
    indexed.map(|(index, proto)| local_reply(proto, strict).at(format_args!("mappers[{index}]"))).collect()
}

fn local_reply(proto: &ResponseMapper, strict: bool) -> Result<LocalReply> {
    let filter = proto.filter.as_ref().ok_or_else(|| Reject::new("must be given"));
    let format = proto.body_format_override.as_ref();
    let body = |source: &DataSource| match &source.specifier {
        Some(Specifier::InlineString(text)) => Ok(text.as_str().into()),
        _ => Err(Reject::new("must be an inline_string").at_field("body")),
    };
    Ok(LocalReply {
        filter: filter.and_then(|filter| access_log::filter(filter, strict)).at("filter")?,
        status: number(proto.status_code).map(status_code).transpose().at("status_code")?,
        body: proto.body.as_ref().map(body).transpose()?,
        content_type: match format {
            None => None,
            Some(format) if is_body(format) => Some(format.content_type.as_str())
                .filter(|content_type| !content_type.is_empty())
                .map(Into::into),
            Some(_) => {
                let reject = Reject::new("only %LOCAL_REPLY_BODY% as text is supported");
                return Err(reject.at_field("body_format_override"));
            }
        },
        headers: route::additions(&proto.headers_to_add).at("headers_to_add")?,
    })
}

/// Returns whether a format consists of the body alone.
fn is_body(format: &SubstitutionFormatString) -> bool {
    const BODY: &str = "%LOCAL_REPLY_BODY%";
    match &format.format {
        Some(Format::TextFormatSource(source)) => {
            matches!(&source.specifier, Some(Specifier::InlineString(text)) if text == BODY)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use skysail_xds::envoy::pb::envoy::config::accesslog::v3::{
        AccessLogFilter, ResponseFlagFilter, access_log_filter::FilterSpecifier,
    };

    use super::*;

    fn text(text: &str) -> DataSource {
        DataSource { specifier: Some(Specifier::InlineString(text.to_owned())), ..Default::default() }
    }

    fn mapper(format: &str) -> LocalReplyConfig {
        let limited = FilterSpecifier::ResponseFlagFilter(ResponseFlagFilter { flags: vec!["RL".into()] });
        let format = SubstitutionFormatString {
            content_type: "application/json".into(),
            format: Some(Format::TextFormatSource(text(format))),
            ..Default::default()
        };
        let mapper = ResponseMapper {
            filter: Some(AccessLogFilter { filter_specifier: Some(limited) }),
            body: Some(text("{}")),
            body_format_override: Some(format),
            ..Default::default()
        };
        LocalReplyConfig { mappers: vec![mapper], ..Default::default() }
    }

    #[test]
    fn mappers_are_translated_and_other_formats_refused() {
        let replies = translate(Some(&mapper("%LOCAL_REPLY_BODY%")), true).unwrap();
        let reply = &replies[0];
        assert_eq!((reply.body.as_deref(), reply.status), (Some("{}"), None));
        assert_eq!(reply.content_type.as_deref(), Some("application/json"));
        let refused = translate(Some(&mapper("%RESPONSE_CODE%")), true).unwrap_err().to_string();
        assert!(refused.contains("mappers[0].body_format_override"), "{refused}");
        let mut whole = mapper("%LOCAL_REPLY_BODY%");
        whole.body_format = Some(SubstitutionFormatString::default());
        assert!(translate(Some(&whole), true).unwrap_err().to_string().contains("body_format"));
        assert!(translate(None, true).unwrap().is_empty());
    }
}
