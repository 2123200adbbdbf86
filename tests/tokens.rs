//! Tokens in a mesh: RequestAuthentication verifies them, AuthorizationPolicy requires them and their claims.

use skysail_testkit::{Mesh, Setup, pod, service};

/// Key set of the tokens. Its private key was deleted after they were signed.
const KEYS: &str = r#"{"keys":[{"kty":"RSA","kid":"k","alg":"RS256","use":"sig","e":"AQAB","n":"rLYBtCljBoUMQ9cKRTq5j8uwg_B2Lz5BonHNXI1FfvcPjgyqyzcmwPAo-YJFiJFBuuzXhuEhu9ZpN75v6GEYaTEWlI3ojq5588_AsGbZ7ScSlbkrEA4IlJsP_t1R__zcT0h7hIUn9EC-GXMIhJROel5552BVGTKQHXpPm41FiWHcfd-LnYr7eFmOxNztA0Dxopz2eF4qj2aRZH51lsVKWbXUmaHbLYGBjqWfm1BVCUfvUPBByV5CppngnO335abD8q-5Nb-xEB7aS4YF5JBPtg1w0rih9EAmYb9YxessdlTuUu8DfihofDjLadC0N1h7QLdUb9n-MENObQhZk1CAdQ"}]}"#;
/// Token of `alice`, claims `team: blue` and `realm.roles: [editor, reader]`, valid until 2100.
const EDITOR: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6ImsiLCJ0eXAiOiJKV1QifQ.eyJpc3MiOiJodHRwczovL3Rva2Vucy5leGFtcGxlLmNvbSIsInN1YiI6ImFsaWNlIiwiYXVkIjoic2hvcCIsImV4cCI6NDEwMjQ0NDgwMCwidGVhbSI6ImJsdWUiLCJyZWFsbSI6eyJyb2xlcyI6WyJlZGl0b3IiLCJyZWFkZXIiXX19.bYQAANsLxJeL5iaXRKoNKkeFV5T6MW7S4ygI7yj5T-lcNN1pMzVGS99m7P75-ZmfiDtihAaAcB0w9GZFyXHWgNDc9pg5CT5qI6S4OV2NMI1OnfFOB8uxXHzP9yr-cZLauypm6Vuh4DEtNop2mCYV5ts7hgfvfafPK4rAILCLESSMPRbcVVOsFxac7ddSdqfk_UKBhwx71Rn-oAYK1--HB7ajrVTZA9u58P84E12UELb866TeFz5EsXepIzyaUl4DHQOAcRrMUKrYGzbEpiiU3dmJjAFDGMU5oMJ3lvSw-WeBf4zs0oo7RZt2bOGThjfOGiOFKnib3Ek2FROk23hI9Q";
/// Token of `bob`, claim `realm.roles: [reader]`, valid until 2100.
const READER: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6ImsiLCJ0eXAiOiJKV1QifQ.eyJpc3MiOiJodHRwczovL3Rva2Vucy5leGFtcGxlLmNvbSIsInN1YiI6ImJvYiIsImF1ZCI6InNob3AiLCJleHAiOjQxMDI0NDQ4MDAsInJlYWxtIjp7InJvbGVzIjpbInJlYWRlciJdfX0.NmTWaHUMm4GoLPWV7lM440ZJ9xMTmozPm3Yy_K17pTgETcuI8xJvVkBjXrY-9kiqX8lhM-MMelQwqq5n5QXqbrtSTv3UKkLLV8sEoha4PXF0GVcqtT7zoHktZfK_icS-_ONPBgCF88KSqEeuvoTvNmp-vl8_xHVQNsHrbxIgGxbxacKIB_R-Wpd_PjV9mhY3n36NG4NvTuC17tVxpzlG6BJSkMmc0Td1s73lThij8GMbUoflofglH0WX3lAfD88fSY7hX9PSEcWQiX35PTR-eMbVGfBRE1uF45LmbQ65rq-ofkC49c9qmq5D57wJ7HZJZ2pW-zq3PXZLsNxvRjYBRg";
/// Token of `alice` that expired in 2001.
const EXPIRED: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6ImsiLCJ0eXAiOiJKV1QifQ.eyJpc3MiOiJodHRwczovL3Rva2Vucy5leGFtcGxlLmNvbSIsInN1YiI6ImFsaWNlIiwiYXVkIjoic2hvcCIsImV4cCI6MTAwMDAwMDAwMH0.iI4X2osRrlZ1JQAQUFeZsI0PUSk1nxNn39Le4_sJMqrGHs4_1fidWgedn-izqga6kOGi0UlLOEQetgXuMTmdVNv8ApANax6_lrvh3cnfYSogaQziCrAGhq53z-tJAX-nqZkj-tk6d_nJzP0vM3wixua4YtCGIpyP7mh0mdpU4y5dAHQDVRTpHHIxJobYHsbOiUJ-vwIJWEz9rYN2fXwih9QFug7xqeEgx0bluywQ7fAx-IwbsxYHtr27B72HiE1_r9H7h2AbqicwaMqXh00NCrnGJLyrEk4n6QjOiEC3Me877OvM06h5cGo1yBXmD0KOX3HwUCQ765UX1CprV197zQ";

const POLICIES: &str = r"
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: tokens}
spec:
  selector: {matchLabels: {app: web}}
  jwtRules:
  - issuer: https://tokens.example.com
    audiences: [shop]
    jwks: 'KEYS'
    fromHeaders: [{name: authorization, prefix: 'Bearer '}, {name: x-token}]
    fromParams: [token]
    fromCookies: [session]
    forwardOriginalToken: true
    outputPayloadToHeader: x-payload
    outputClaimToHeaders: [{header: x-team, claim: team}, {header: x-realm-roles, claim: realm.roles}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: tokens}
spec:
  selector: {matchLabels: {app: web}}
  rules:
  - to: [{operation: {paths: [/open]}}]
  - from: [{source: {requestPrincipals: ['https://tokens.example.com/*']}}]
    to: [{operation: {paths: [/member]}}]
  - when: [{key: 'request.auth.claims[realm][roles]', values: [editor]}]
    to: [{operation: {paths: [/edit]}}]
";

/// Starts a service and a client with these policies.
fn start(policies: &str) -> Mesh {
    let text = [service("web"), pod("web"), pod("front"), policies.to_owned()].join("---\n");
    Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready()
}

fn status(mesh: &Mesh, path: &str, arguments: &[&str], status: u16) {
    let answer = mesh.call("front", &format!("http://web{path}"), arguments);
    assert_eq!(answer.status, Some(status), "{path} {arguments:?}: {answer:?}");
}

#[test]
fn tokens_are_verified_and_required() {
    let mesh = start(&POLICIES.replace("KEYS", KEYS));
    let bearer = |token: &str| format!("authorization: Bearer {token}");
    let (editor, reader, expired) = (bearer(EDITOR), bearer(READER), bearer(EXPIRED));
    mesh.wait_status("front", "http://web/open", &[], 200);
    mesh.wait_status("front", "http://web/member", &["-H", &editor], 200);

    // Without a token only the policy decides; a token must be valid everywhere.
    status(&mesh, "/member", &[], 403);
    let forged = format!("{}AAAA", &editor[..editor.len() - 4]);
    for token in [&expired, &forged, &bearer("no.token.here")] {
        for path in ["/open", "/member"] {
            status(&mesh, path, &["-H", token], 401);
        }
    }
    status(&mesh, "/member", &["-H", &reader], 200);

    // Claims within claims.
    status(&mesh, "/edit", &["-H", &editor], 200);
    status(&mesh, "/edit", &["-H", &reader], 403);
    status(&mesh, "/edit", &[], 403);

    // Other locations of the token.
    status(&mesh, "/member", &["-H", &format!("x-token: {EDITOR}")], 200);
    status(&mesh, "/member", &["-H", &format!("cookie: a=b; session={EDITOR}")], 200);
    status(&mesh, &format!("/member?token={EDITOR}"), &[], 200);

    // Claims as headers, which a client cannot set itself.
    let echo = mesh.call("front", "http://web/member", &["-H", &editor, "-H", "x-team: red"]).json();
    assert_eq!(echo["headers"]["x-team"], "blue", "{echo:#}");
    assert!(echo["headers"]["x-payload"].is_string(), "{echo:#}");
    assert_eq!(echo["headers"]["authorization"], editor.strip_prefix("authorization: ").unwrap(), "{echo:#}");

    // A policy with an error keeps its last version, so tokens are still required.
    mesh.edit("mesh.yaml", "fromParams: [token]", "fromParam: [token]");
    mesh.wait_for_output("unknown field");
    status(&mesh, "/member", &[], 403);
    status(&mesh, "/member", &["-H", &editor], 200);
}

#[test]
fn no_token_is_valid_without_a_key_set() {
    let mesh = start(&POLICIES.replace("jwks: 'KEYS'", "jwksUri: http://127.0.0.1:9/keys"));
    mesh.wait_status("front", "http://web/open", &[], 200);
    status(&mesh, "/open", &["-H", &format!("authorization: Bearer {EDITOR}")], 401);
    status(&mesh, "/member", &[], 403);
}
