//! Translates access logs and their filters.

use std::sync::Arc;

use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            accesslog::v3::{
                AccessLog as Proto, AccessLogFilter, ComparisonFilter, ExtensionFilter, access_log,
                access_log_filter, comparison_filter::Op, extension_filter,
            },
            core::v3::{SubstitutionFormatString, substitution_format_string::Format as FormatProto},
        },
        extensions::access_loggers::{
            file::v3::{FileAccessLog, file_access_log::AccessLogFormat},
            filters::cel::v3::ExpressionFilter,
            grpc::v3::TcpGrpcAccessLogConfig,
        },
    },
    google::protobuf::{Struct, value::Kind},
};

use super::{
    At as _, Reject, Result, Translator, collector, flag, text, tls_context, type_name, unknown_type, unpack,
    warn_once,
};
use skysail_policy::{
    config::{
        http::{AccessLog, LogFormat, LogTarget},
        log_filter::{Comparison, LogFilter},
    },
    error::Flags,
    expression::Expression,
};

/// Envoy's default format.
const DEFAULT: &str = "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" \
    %RESPONSE_CODE% %RESPONSE_FLAGS% %BYTES_RECEIVED% %BYTES_SENT% %DURATION% \
    %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% \"%REQ(X-FORWARDED-FOR)%\" \"%REQ(USER-AGENT)%\" \
    \"%REQ(X-REQUEST-ID)%\" \"%REQ(:AUTHORITY)%\" \"%UPSTREAM_HOST%\"\n";

/// Translates a list of access logs.
pub(super) fn access_logs(protos: &[Proto], translator: Translator<'_>) -> Result<Vec<Arc<AccessLog>>> {
    let numbered = protos.iter().enumerate();
    numbered
        .map(|(index, proto)| {
            access_log(proto, translator).map(Arc::new).at(format_args!("access_log[{index}]"))
        })
        .collect()
}

/// Translates the access logs of a listener. Only connections without a matching filter chain are logged there.
/// A log with any other filter is an error in a file, otherwise a warning.
pub(super) fn of_listener(protos: &[Proto], translator: Translator<'_>) -> Result<Vec<Arc<AccessLog>>> {
    let logs = access_logs(protos, translator)?;
    for (index, log) in logs.iter().enumerate() {
        if matches!(&log.filter, Some(LogFilter::Flags(Some(flags))) if *flags == Flags::NR) {
            continue;
        }
        let reject = Reject::new(
            "only connections without a filter chain are logged: set filter.response_flag_filter.flags to [NR]",
        );
        let reject = reject.at_field(format_args!("access_log[{index}]"));
        if translator.strict {
            return Err(reject);
        }
        warn_once(reject.to_string());
    }
    Ok(logs)
}

fn access_log(proto: &Proto, Translator { node, strict, .. }: Translator<'_>) -> Result<AccessLog> {
    let Some(access_log::ConfigType::TypedConfig(any)) = &proto.config_type else {
        return Err(Reject::new(format!("access log {:?} has no typed_config", proto.name)));
    };
    let to = match type_name(any) {
        "envoy.extensions.access_loggers.file.v3.FileAccessLog" => {
            let file: FileAccessLog = unpack(any)?;
            format(&file).map(|format| LogTarget::File { path: file.path.into(), format })
        }
        "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig" => {
            collector::http(&unpack(any)?, node)
        }
        "envoy.extensions.access_loggers.grpc.v3.TcpGrpcAccessLogConfig" => {
            let tcp: TcpGrpcAccessLogConfig = unpack(any)?;
            collector::tcp(tcp.common_config.as_ref(), node)
        }
        "envoy.extensions.access_loggers.open_telemetry.v3.OpenTelemetryAccessLogConfig" => {
            collector::records(&unpack(any)?, node)
        }
        _ => return Err(unknown_type("access log", &proto.name, any)),
    };
    let to = to.at("typed_config")?;
    let filter = proto.filter.as_ref().map(|proto| filter(proto, strict)).transpose().at("filter")?;
    Ok(AccessLog { to, filter })
}

/// Translates a filter.
pub(super) fn filter(proto: &AccessLogFilter, strict: bool) -> Result<LogFilter> {
    use access_log_filter::FilterSpecifier as Of;
    let filters = |protos: &[AccessLogFilter]| {
        protos.iter().map(|proto| filter(proto, strict)).collect::<Result<_>>().at("filters")
    };
    Ok(match proto.filter_specifier.as_ref().ok_or_else(|| Reject::new("must say what is logged"))? {
        Of::StatusCodeFilter(of) => {
            LogFilter::Status(comparison(of.comparison.as_ref()).at("status_code_filter")?)
        }
        Of::DurationFilter(of) => {
            LogFilter::Duration(comparison(of.comparison.as_ref()).at("duration_filter")?)
        }
        // Health check requests are not identified, so every request passes.
        Of::NotHealthCheckFilter(_) => LogFilter::Fraction(1_000_000),
        Of::RuntimeFilter(of) => LogFilter::Fraction(of.percent_sampled.as_ref().map_or(0, text::millionths)),
        Of::AndFilter(of) => LogFilter::All(filters(&of.filters).at("and_filter")?),
        Of::OrFilter(of) => LogFilter::OneOf(filters(&of.filters).at("or_filter")?),
        Of::HeaderFilter(of) => {
            let header = of.header.as_ref().ok_or_else(|| Reject::new("must be given").at_field("header"));
            LogFilter::Header(header.and_then(text::header).at("header_filter")?)
        }
        Of::ResponseFlagFilter(of) if of.flags.is_empty() => LogFilter::Flags(None),
        Of::ResponseFlagFilter(of) => {
            let mut flags = Flags::NONE;
            for name in &of.flags {
                let Some(flag) = Flags::named(name) else {
                    let reject = Reject::new(format!("{name:?} is not a supported response flag"));
                    return all(reject.at_field("response_flag_filter"), strict);
                };
                flags.insert(flag);
            }
            LogFilter::Flags(Some(flags))
        }
        Of::GrpcStatusFilter(of) => LogFilter::GrpcStatus {
            statuses: of.statuses.iter().map(|status| status.cast_unsigned()).collect(),
            exclude: of.exclude,
        },
        Of::MetadataFilter(of) => {
            let matcher = of.matcher.as_ref().ok_or_else(|| Reject::new("must be given").at_field("matcher"));
            LogFilter::Metadata {
                test: matcher.and_then(text::metadata).at("metadata_filter")?,
                otherwise: flag(of.match_if_key_not_found).unwrap_or(true),
            }
        }
        Of::ExtensionFilter(of) => return extension(of, strict).at("extension_filter"),
        _ => return all(Reject::new("this kind of filter is not supported"), strict),
    })
}

/// Returns a filter that matches everything in place of an unsupported one; an error with `strict`.
fn all(reject: Reject, strict: bool) -> Result<LogFilter> {
    if strict {
        return Err(reject);
    }
    warn_once(format!("an access log writes all entries because its filter is unusable: {reject}"));
    Ok(LogFilter::Fraction(1_000_000))
}

fn extension(proto: &ExtensionFilter, strict: bool) -> Result<LogFilter> {
    let Some(extension_filter::ConfigType::TypedConfig(any)) = &proto.config_type else {
        return Err(Reject::new("must be given").at_field("typed_config"));
    };
    if type_name(any) != "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter" {
        return all(unknown_type("filter of access logs", &proto.name, any), strict);
    }
    let ExpressionFilter { expression: text, .. } = unpack(any)?;
    expression(&text, strict).map(LogFilter::Expression).at("typed_config.expression")
}

/// Compiles a CEL expression. An unknown attribute is an error with `strict`, otherwise a warning: as in Envoy,
/// it fails when the expression is evaluated.
pub(super) fn expression(text: &str, strict: bool) -> Result<Expression> {
    let expression = Expression::compile(text).map_err(Reject::new)?;
    let unknown = expression.unknown().join(", ");
    match (unknown.as_str(), strict) {
        ("", _) => {}
        (unknown, true) => {
            return Err(Reject::new(format!("{text:?} uses an unknown attribute: {unknown}")));
        }
        (unknown, false) => {
            warn_once(format!("the expression {text:?} uses an unknown attribute: {unknown}"));
        }
    }
    Ok(expression)
}

fn comparison(proto: Option<&ComparisonFilter>) -> Result<Comparison> {
    let proto = proto.ok_or_else(|| Reject::new("must be given").at_field("comparison"))?;
    let value = proto.value.as_ref().map_or(0, |value| value.default_value);
    Ok(match proto.op() {
        Op::Eq => Comparison::Equal(value),
        Op::Ne => Comparison::NotEqual(value),
        Op::Ge => Comparison::AtLeast(value),
        Op::Le => Comparison::AtMost(value),
    })
}

#[expect(deprecated, reason = "older files still use the older fields")]
fn format(file: &FileAccessLog) -> Result<LogFormat> {
    match &file.access_log_format {
        None => text_format(DEFAULT, false),
        Some(AccessLogFormat::Format(text)) => text_format(text, false).at("format"),
        Some(AccessLogFormat::JsonFormat(fields) | AccessLogFormat::TypedJsonFormat(fields)) => {
            json(fields).at("json_format")
        }
        Some(AccessLogFormat::LogFormat(format)) => log_format(format).at("log_format"),
    }
}

#[expect(deprecated, reason = "older files still use the older fields")]
fn log_format(proto: &SubstitutionFormatString) -> Result<LogFormat> {
    match &proto.format {
        None => Err(Reject::new("must be given")),
        Some(FormatProto::TextFormat(text)) => text_format(text, proto.omit_empty_values).at("text_format"),
        Some(FormatProto::TextFormatSource(source)) => {
            let bytes = tls_context::read(source).at("text_format_source")?;
            let text = String::from_utf8_lossy(&bytes);
            text_format(&text, proto.omit_empty_values).at("text_format_source")
        }
        Some(FormatProto::JsonFormat(fields)) => json(fields).at("json_format"),
    }
}

/// Translates a text format. An operator without a value becomes `-`, or nothing if `omits_empty`.
fn text_format(text: &str, omits_empty: bool) -> Result<LogFormat> {
    let empty: &[u8] = if omits_empty { b"" } else { b"-" };
    Ok(LogFormat::Text(text::lenient_format(text)?, empty))
}

/// Translates a JSON format. Fields are in the order of their names, as Envoy writes them. An operator without a value
/// becomes `null`, or `-` within a longer text.
fn json(fields: &Struct) -> Result<LogFormat> {
    let mut parts = Vec::new();
    for (name, value) in &fields.fields {
        let Some(Kind::StringValue(text)) = &value.kind else {
            return Err(Reject::new(format!("{name:?} must be a text: nested values are not supported")));
        };
        parts.push((name.as_str().into(), text::lenient_format(text).at(name)?));
    }
    parts.sort_by(|(a, _): &(Box<str>, _), (b, _)| a.cmp(b));
    Ok(LogFormat::Json(parts))
}

#[cfg(test)]
mod tests {
    use prost::{Message as _, Name as _};
    use skysail_xds::envoy::pb::google::protobuf::Any;

    use super::*;

    fn extension(type_url: String, expression: &str) -> AccessLogFilter {
        let value = ExpressionFilter { expression: expression.to_owned(), cel_config: None }.encode_to_vec();
        let typed = extension_filter::ConfigType::TypedConfig(Any { type_url, value });
        let filter = ExtensionFilter { name: "f".to_owned(), config_type: Some(typed) };
        let filter = access_log_filter::FilterSpecifier::ExtensionFilter(filter);
        AccessLogFilter { filter_specifier: Some(filter) }
    }

    #[test]
    fn expressions_are_compiled_during_translation() {
        let expression = |text| extension(ExpressionFilter::type_url(), text);
        for strict in [true, false] {
            let good = filter(&expression("response.code >= 400"), strict);
            assert!(matches!(good, Ok(LogFilter::Expression(_))));
            // As in Envoy, the listener is refused.
            let wrong = filter(&expression("response.code >="), strict).unwrap_err().to_string();
            assert!(
                wrong.starts_with("extension_filter.typed_config.expression: \"response.code >=\" is no")
            );
            assert!(wrong.contains("line 1, column "), "{wrong}");
        }
        let unknown = filter(&expression("xds.node == 'a'"), true).unwrap_err().to_string();
        assert!(unknown.ends_with("\"xds.node == 'a'\" uses an unknown attribute: xds.node"), "{unknown}");
        assert!(filter(&expression("xds.node == 'a'"), false).is_ok());
    }

    #[test]
    fn an_unsupported_filter_matches_everything_or_is_refused() {
        let other = extension("type.googleapis.com/a.B".to_owned(), "");
        assert!(filter(&other, true).unwrap_err().to_string().contains("of type a.B: remove it"));
        assert!(matches!(filter(&other, false), Ok(LogFilter::Fraction(1_000_000))));
    }
}
