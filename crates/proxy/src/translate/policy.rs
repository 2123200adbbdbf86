//! Translates RBAC.

use std::sync::Arc;

use skysail_xds::envoy::pb::envoy::{
    config::{
        core::v3::CidrRange,
        rbac::v3::{
            MetadataSource, Permission as PermissionProto, Policy as PolicyProto,
            Principal as PrincipalProto, Rbac, SourcedMetadata, permission, principal, rbac::Action,
        },
    },
    extensions::{
        filters::{http::rbac::v3::Rbac as HttpRbac, network::rbac::v3::Rbac as NetworkRbac},
        path::r#match::uri_template::v3::UriTemplateMatchConfig,
    },
    r#type::matcher::v3::filter_state_matcher,
};

use super::{At as _, Reject, Result, number, text, unpack};
use skysail_policy::config::{
    listener::Cidr,
    policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
    text::MetadataMatch,
};

/// Translates the HTTP filter.
pub(super) fn http(proto: &HttpRbac) -> Result<Arc<Policy>> {
    Ok(Arc::new(Policy {
        rules: proto.rules.as_ref().map(rules).transpose().at("rules")?,
        shadow: proto.shadow_rules.as_ref().map(rules).transpose().at("shadow_rules")?,
        shadow_prefix: proto.shadow_rules_stat_prefix.as_str().into(),
    }))
}

/// Translates the network filter.
pub(super) fn network(proto: &NetworkRbac) -> Result<Arc<Policy>> {
    Ok(Arc::new(Policy {
        rules: proto.rules.as_ref().map(rules).transpose().at("rules")?,
        shadow: proto.shadow_rules.as_ref().map(rules).transpose().at("shadow_rules")?,
        shadow_prefix: proto.shadow_rules_stat_prefix.as_str().into(),
    }))
}

fn rules(proto: &Rbac) -> Result<Rules> {
    let action = match proto.action() {
        Action::Allow => RuleAction::Allow,
        Action::Deny => RuleAction::Deny,
        Action::Log => RuleAction::Log,
    };
    let mut rules = Vec::new();
    for (name, policy) in &proto.policies {
        rules.push(rule(name, policy).at(format_args!("policies[{name:?}]"))?);
    }
    Ok(Rules::new(action, rules))
}

fn rule(name: &str, proto: &PolicyProto) -> Result<Rule> {
    Ok(Rule {
        name: name.into(),
        permissions: permissions(&proto.permissions).at("permissions")?,
        principals: principals(&proto.principals).at("principals")?,
    })
}

fn permissions(protos: &[PermissionProto]) -> Result<Vec<Permission>> {
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, proto)| permission(proto).at(format_args!("[{index}]"))).collect()
}

#[expect(deprecated, reason = "`metadata` is what control planes send")]
fn permission(proto: &PermissionProto) -> Result<Permission> {
    use permission::Rule as R;
    Ok(match &proto.rule {
        Some(R::Any(true)) => Permission::Any,
        Some(R::AndRules(set)) => Permission::All(permissions(&set.rules).at("and_rules.rules")?),
        Some(R::OrRules(set)) => Permission::OneOf(permissions(&set.rules).at("or_rules.rules")?),
        Some(R::NotRule(rule)) => Permission::Not(Box::new(permission(rule).at("not_rule")?)),
        Some(R::Header(header)) => Permission::Header(text::header(header).at("header")?),
        Some(R::UrlPath(path)) => Permission::Path(text::path(path).at("url_path")?),
        Some(R::DestinationIp(range)) => Permission::Ip(cidr(range).at("destination_ip")?),
        Some(R::DestinationPort(port)) => {
            let port = u16::try_from(*port).map_err(|_| Reject::new(format!("{port} is not a port")));
            Permission::Port(port.at("destination_port")?)
        }
        Some(R::DestinationPortRange(range)) => {
            let (Ok(start), Ok(end)) = (u32::try_from(range.start), u32::try_from(range.end)) else {
                return Err(Reject::new("ports must not be negative").at_field("destination_port_range"));
            };
            Permission::PortRange(start..end)
        }
        Some(R::RequestedServerName(matcher)) => {
            Permission::ServerName(text::text(matcher).at("requested_server_name")?)
        }
        Some(R::UriTemplate(extension)) => {
            let any = extension.typed_config.as_ref();
            let any =
                any.ok_or_else(|| Reject::new("must be given").at_field("uri_template.typed_config"))?;
            let template: UriTemplateMatchConfig = unpack(any).at("uri_template.typed_config")?;
            Permission::Template(template_regex(&template.path_template).at("uri_template")?)
        }
        Some(R::SourcedMetadata(sourced)) => Permission::Metadata(found(sourced).at("sourced_metadata")?),
        Some(R::Metadata(matcher)) => Permission::Metadata(text::metadata(matcher).at("metadata")?),
        _ => return Err(Reject::new("this kind of permission is not supported")),
    })
}

fn principals(protos: &[PrincipalProto]) -> Result<Vec<Principal>> {
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, proto)| principal(proto).at(format_args!("[{index}]"))).collect()
}

#[expect(deprecated, reason = "`metadata` and source_ip are what control planes send")]
fn principal(proto: &PrincipalProto) -> Result<Principal> {
    use principal::Identifier as I;
    Ok(match &proto.identifier {
        Some(I::Any(true)) => Principal::Any,
        Some(I::AndIds(set)) => Principal::All(principals(&set.ids).at("and_ids.ids")?),
        Some(I::OrIds(set)) => Principal::OneOf(principals(&set.ids).at("or_ids.ids")?),
        Some(I::NotId(id)) => Principal::Not(Box::new(principal(id).at("not_id")?)),
        Some(I::Authenticated(authenticated)) => Principal::Authenticated(
            authenticated
                .principal_name
                .as_ref()
                .map(text::text)
                .transpose()
                .at("authenticated.principal_name")?,
        ),
        Some(I::SourceIp(range)) => Principal::DirectIp(cidr(range).at("source_ip")?),
        Some(I::DirectRemoteIp(range)) => Principal::DirectIp(cidr(range).at("direct_remote_ip")?),
        Some(I::RemoteIp(range)) => Principal::RemoteIp(cidr(range).at("remote_ip")?),
        Some(I::Header(header)) => Principal::Header(text::header(header).at("header")?),
        Some(I::UrlPath(path)) => Principal::Path(text::path(path).at("url_path")?),
        // Istio's filter state key of the peer's SPIFFE ID, which its metadata exchange sets.
        Some(I::FilterState(state)) if state.key == "io.istio.peer_principal" => match &state.matcher {
            Some(filter_state_matcher::Matcher::StringMatch(matcher)) => {
                Principal::Authenticated(Some(text::text(matcher).at("filter_state.string_match")?))
            }
            _ => return Err(Reject::new("must be a string_match").at_field("filter_state")),
        },
        Some(I::FilterState(state)) => {
            return Err(Reject::new(format!("{:?} is not supported", state.key)).at_field("filter_state.key"));
        }
        Some(I::SourcedMetadata(sourced)) => Principal::Metadata(found(sourced).at("sourced_metadata")?),
        Some(I::Metadata(matcher)) => Principal::Metadata(text::metadata(matcher).at("metadata")?),
        _ => return Err(Reject::new("this kind of principal is not supported")),
    })
}

/// Translates a match on dynamic metadata that earlier filters set.
fn found(proto: &SourcedMetadata) -> Result<MetadataMatch> {
    if proto.metadata_source() != MetadataSource::Dynamic {
        return Err(Reject::new("only DYNAMIC is supported").at_field("metadata_source"));
    }
    let matcher = proto.metadata_matcher.as_ref();
    text::metadata(matcher.ok_or_else(|| Reject::new("must be given").at_field("metadata_matcher"))?)
        .at("metadata_matcher")
}

/// Translates a range of addresses.
pub(super) fn cidr(proto: &CidrRange) -> Result<Cidr> {
    let address: std::net::IpAddr = proto
        .address_prefix
        .parse()
        .map_err(|_| Reject::new(format!("{:?} is not an IP address", proto.address_prefix)))?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let length = number(proto.prefix_len).unwrap_or(0);
    match u8::try_from(length) {
        Ok(prefix_len) if prefix_len <= longest => Ok(Cidr { address, prefix_len }),
        _ => Err(Reject::new(format!("{length} is longer than the {longest} bits of the address"))
            .at_field("prefix_len")),
    }
}

/// Compiles a path template to a regular expression: `{*}` matches one segment, `{**}` any number of
/// characters; `{name=*}` is the same with a name.
pub(super) fn template_regex(template: &str) -> Result<regex::bytes::Regex> {
    let mut pattern = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        pattern.push_str(&regex::escape(before));
        let (variable, after) = after
            .split_once('}')
            .ok_or_else(|| Reject::new(format!("{template:?}: a bracket is not closed")))?;
        let glob = variable.split_once('=').map_or(variable, |(_, glob)| glob);
        pattern.push_str(match glob {
            "**" => ".*",
            // A variable with only a name matches one segment.
            _ if glob == "*" || !variable.contains(['=', '*']) => "[^/]+",
            _ => return Err(Reject::new(format!("{template:?}: {{{variable}}} is not supported"))),
        });
        rest = after;
    }
    // Wildcards are also allowed outside of braces.
    let tail = regex::escape(rest).replace(r"\*\*", ".*").replace(r"\*", "[^/]+");
    pattern.push_str(&tail);
    text::anchored(&pattern)
}
