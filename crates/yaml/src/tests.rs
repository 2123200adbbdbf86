//! Tests of documents, scalars, anchors and limits.

use super::*;

fn roots(text: &str) -> Vec<Result<Node, u32>> {
    documents(text).map(|document| document.root.map_err(|error| error.line)).collect()
}

#[test]
fn lines_are_counted_from_the_start_of_the_file() {
    let documents: Vec<_> = documents("# hello\na: 1\n---\nb:\n  c: [x, y]\n--- # third\nd: 1\n").collect();
    let roots: Vec<_> = documents.iter().map(|document| document.root.as_ref().unwrap()).collect();
    assert_eq!(roots.len(), 3);
    assert_eq!(roots[1].get("b").unwrap().get("c").unwrap().line, 5);
    assert_eq!(roots[2].get("d").unwrap().line, 7);
    assert_eq!(documents[1].line, 3);
}

#[test]
fn a_broken_document_does_not_affect_others() {
    let roots = roots("a: 1\n---\nb: [1, 2\n---\nc: 3\n");
    assert!(roots[0].is_ok() && roots[1].is_err() && roots[2].is_ok(), "{roots:?}");
}

#[test]
fn directives_comments_empty_documents_and_windows_line_ends() {
    assert_eq!(roots("%YAML 1.2\n---\na: 1\n").len(), 1);
    assert_eq!(roots("# only a comment\n---\n---\n# another\n").len(), 0);
    assert_eq!(roots("\u{feff}a: 1\r\n---\r\nb: 2\r\n").len(), 2);
    assert_eq!(roots("").len(), 0);
}

#[test]
fn the_documents_of_a_text_are_counted_without_parsing() {
    let text = "# only a comment\n---\na: [\n---\n---\n# another\nb: 1\n--- {c: 1}\n";
    assert_eq!([0, 1, 2, 3].map(|count| line_after(text, count)), [Some(1), Some(5), Some(8), None]);
}

#[test]
fn documents_are_read_one_by_one() {
    let mut documents = documents("a: 1\n...\nb: 2\n...\nc: [\n---\nd: 4\n");
    let mut next = || documents.next().map(|document| (document.line, document.root.is_ok()));
    assert_eq!([next(), next(), next()], [Some((1, true)), Some((3, true)), Some((5, false))]);
    assert_eq!([next(), next()], [Some((6, true)), None]);
}

#[test]
fn plain_scalars_are_typed_as_in_kubernetes() {
    let value = |text: &str| plain(text);
    assert_eq!(value("1"), Value::Int(1));
    assert_eq!(value("-0x10"), Value::Int(-16));
    assert_eq!([value("0"), value("0400"), value("-010")], [0, 256, -8].map(Value::Int));
    assert_eq!(value("080"), Value::Int(80));
    for odd in ["0x-10", "-0x-80000000000000000000000000000000", "0o+7"] {
        assert_eq!(value(odd), Value::Text(odd.into(), false));
    }
    assert_eq!(value("1.5"), Value::Float(1.5));
    assert_eq!(value("1e3"), Value::Float(1000.0));
    assert_eq!(value("yes"), Value::Bool(true));
    assert_eq!(value("1.2.3"), Value::Text("1.2.3".into(), false));
    assert_eq!(value("inf"), Value::Text("inf".into(), false));
    assert_eq!(value("10s"), Value::Text("10s".into(), false));
    assert_eq!(value("-"), Value::Text("-".into(), false));
}

#[test]
fn flow_collections_may_be_indented_less_than_the_block_around_them() {
    let text = "a:\n  - b: {\n  c: 1,\n d: [\n2\n]\n}\n";
    let root = documents(text).next().unwrap().root.unwrap();
    assert_eq!(root.to_json(), serde_json::json!({"a": [{"b": {"c": 1, "d": [2]}}]}));
}

#[test]
fn repeated_keys_are_reported_with_path_and_lines() {
    let documents: Vec<_> = documents("a:\n  - b: 1\n  - c: 1\n    c: 2\n").collect();
    assert_eq!(documents[0].duplicates, [("a[1].c".to_owned(), 4, 3)]);
}

#[test]
fn anchors_and_merge_keys_are_expanded_within_limits() {
    let documents: Vec<_> = documents("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\n").collect();
    let y = documents[0].root.as_ref().unwrap().get("y").unwrap();
    assert_eq!(y.get("a").unwrap().value, Value::Int(1));
    assert_eq!(y.get("b").unwrap().value, Value::Int(3));
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..9 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
    }
    assert!(roots(&bomb)[0].is_err());
    assert!(roots(&"[".repeat(5000))[0].is_err());
    // Each alias adds its depth to the depth of the alias before it.
    let mut deep = String::from("a0: &a0 x\n");
    for level in 1..200 {
        let (open, close) = ("[".repeat(40), "]".repeat(40));
        deep.push_str(&format!("a{level}: &a{level} {open}*a{}{close}\n", level - 1));
    }
    assert!(roots(&deep)[0].is_err());
    // Each anchor stores all of its content.
    let anchors: String = (0..90).map(|level| format!("&b{level} [")).collect();
    let kept = format!("{anchors}{}{}", "x, ".repeat(20_000), "]".repeat(90));
    assert!(roots(&kept)[0].is_err());
    let anchors = |count: usize| (0..count).map(|anchor| format!("- &a{anchor} x\n")).collect::<String>();
    assert!(roots(&anchors(10_000))[0].is_ok());
    assert_eq!(roots(&anchors(10_001))[0], Err(10_001));
    let keys: String = (0..10_001).map(|key| format!("k{key}: 1\n")).collect();
    assert!(roots(&keys)[0].is_err());
}

#[test]
fn objects_of_more_than_kubernetes_limit_are_refused() {
    let error = |text: &str| objects(text).next().unwrap().root.err();
    let text = |length: usize| format!("# {}\na:\n    {}\n", "c".repeat(MAX_OBJECT), "x".repeat(length));
    // The mapping, the key and the text have the syntax of JSON; comments and indentation do not count.
    let longest = MAX_OBJECT - 3 * SYNTAX - 1;
    assert!(error(&text(longest)).is_none());
    let refused = error(&text(longest + 1)).unwrap();
    assert!(refused.too_large && refused.message.contains("more than 1572864 bytes"), "{refused}");
    assert!(documents(&text(longest + 1)).next().unwrap().root.is_ok());
    // Each item of a list of objects is an object.
    let item = |length: usize| format!("- a: {}\n", "x".repeat(length));
    assert!(error(&format!("items:\n{}", item(longest).repeat(3))).is_none());
    let refused = error(&format!("items:\n{}{}{}", item(1), item(longest + 1), item(1))).unwrap();
    assert_eq!((refused.too_large, refused.line), (true, 3));
    let refused = error(&format!("other:\n{}", item(longest / 2).repeat(3))).unwrap();
    assert_eq!((refused.too_large, refused.line), (true, 1));
    // An alias counts as the content of its anchor.
    let aliases = "*a, ".repeat(MAX_OBJECT / 1_000 + 2);
    assert!(error(&format!("a: &a {}\nb: [{aliases}]\n", "x".repeat(1_000))).unwrap().too_large);
}

#[test]
fn a_document_in_a_field_is_limited_as_a_whole() {
    let bomb = |items: usize| format!("a: &a {}\nitems: [{}]\n", "x".repeat(1_000), "*a, ".repeat(items));
    assert!(embedded(&bomb(1_000)).unwrap().root.is_ok());
    let refused = embedded(&bomb(2_000)).unwrap().root.unwrap_err();
    assert!(refused.too_large && refused.message.contains("more than 1572864 bytes"), "{refused}");
    assert!(objects(&bomb(2_000)).next().unwrap().root.is_ok(), "its items are objects");
    assert!(embedded("").is_none());
}
