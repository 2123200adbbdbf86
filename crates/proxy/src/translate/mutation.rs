//! Translates mutations of headers and query parameters, and the buffering of bodies. Sources:
//! `envoy.extensions.filters.http.header_mutation.v3`, `envoy.extensions.filters.http.buffer.v3`.

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            common::mutation_rules::v3::{HeaderMutation as MutationProto, header_mutation::Action},
            core::v3::{KeyValueMutation, key_value_append::KeyValueAppendAction},
        },
        extensions::filters::http::{
            buffer::v3::{Buffer, BufferPerRoute, buffer_per_route::Override},
            header_mutation::v3::{HeaderMutation as Proto, HeaderMutationPerRoute, Mutations},
        },
    },
    google::protobuf::value::Kind,
};

use super::{At as _, Reject, Result, fingerprint, number, route, text};
use skysail_policy::config::{
    mutation::{HeaderMutation, HeaderMutations, Mutation, QueryMutation},
    route::{AppendAction, HeaderOp, Setting},
};

/// Maximum number of bytes of a request's body that are buffered.
const MAX_BODY: u32 = 256 << 20;

/// Translates the filter for mutations.
pub(super) fn translate(proto: &Proto) -> Result<HeaderMutation> {
    Ok(HeaderMutation {
        mutations: mutations(&proto.mutations.clone().unwrap_or_default()).at("mutations")?,
        most_specific_wins: proto.most_specific_header_mutations_wins,
    })
}

/// Translates a route's mutations.
pub(super) fn of_route(proto: &HeaderMutationPerRoute) -> Result<HeaderMutations> {
    mutations(&proto.mutations.clone().unwrap_or_default()).at("mutations")
}

fn mutations(proto: &Mutations) -> Result<HeaderMutations> {
    Ok(HeaderMutations {
        fingerprint: fingerprint(Proto { mutations: Some(proto.clone()), ..Proto::default() }.to_vec()),
        request: list(&proto.request_mutations).at("request_mutations")?,
        query: proto
            .query_parameter_mutations
            .iter()
            .enumerate()
            .map(|(index, proto)| query(proto).at(format_args!("query_parameter_mutations[{index}]")))
            .collect::<Result<_>>()?,
        response: list(&proto.response_mutations).at("response_mutations")?,
    })
}

fn list(protos: &[MutationProto]) -> Result<Vec<Mutation>> {
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, proto)| mutation(proto).at(format_args!("[{index}]"))).collect()
}

fn mutation(proto: &MutationProto) -> Result<Mutation> {
    Ok(match &proto.action {
        Some(Action::Remove(name)) => Mutation::Op(HeaderOp::Remove(route::field_name(name).at("remove")?)),
        Some(Action::Append(option)) => Mutation::Op(route::addition(option).at("append")?),
        Some(Action::RemoveOnMatch(test)) => {
            let test = test.key_matcher.as_ref().ok_or_else(|| Reject::new("must be given"));
            Mutation::RemoveMatching(test.and_then(text::text).at("remove_on_match.key_matcher")?)
        }
        None => return Err(Reject::new("needs remove, append or remove_on_match")),
    })
}

fn query(proto: &KeyValueMutation) -> Result<QueryMutation> {
    match (&proto.append, proto.remove.as_str()) {
        (None, key) if !key.is_empty() => Ok(QueryMutation::Remove(key.into())),
        (Some(append), "") => {
            let record = append.record.as_ref();
            let record = record.ok_or_else(|| Reject::new("must be given").at_field("append.record"))?;
            let Some(Kind::StringValue(value)) = record.value.as_ref().and_then(|it| it.kind.as_ref()) else {
                return Err(Reject::new("must be a string").at_field("append.record.value"));
            };
            Ok(QueryMutation::Add {
                key: record.key.as_str().into(),
                value: text::format(value).at("append.record.value")?,
                action: match append.action() {
                    KeyValueAppendAction::AppendIfExistsOrAdd => AppendAction::Append,
                    KeyValueAppendAction::AddIfAbsent => AppendAction::AddIfAbsent,
                    KeyValueAppendAction::OverwriteIfExistsOrAdd => AppendAction::Overwrite,
                    KeyValueAppendAction::OverwriteIfExists => AppendAction::OverwriteIfExists,
                },
            })
        }
        _ => Err(Reject::new("needs either append or remove")),
    }
}

/// Translates the buffer filter: returns the maximum size of a body in bytes.
pub(super) fn buffer(proto: &Buffer) -> Result<usize> {
    match number(proto.max_request_bytes) {
        Some(max @ 1..=MAX_BODY) => Ok(max as usize),
        max => {
            let shown = max.unwrap_or(0);
            Err(Reject::new(format!("{shown} is not between 1 and {MAX_BODY}")).at_field("max_request_bytes"))
        }
    }
}

/// Translates a route's setting for the buffer filter.
pub(super) fn buffer_setting(proto: &BufferPerRoute) -> Result<Setting> {
    match &proto.r#override {
        Some(Override::Disabled(true)) => Ok(Setting::Off),
        Some(Override::Buffer(proto)) => Ok(Setting::Buffer(buffer(proto).at("buffer")?)),
        _ => Err(Reject::new("needs disabled: true or a buffer")),
    }
}
