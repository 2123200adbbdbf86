//! Files with one YAML document.

use skysail_yaml::Node;

/// Parses a text that is one document without repeated keys. `what` names its content in messages, such as
/// `scenario`. An error begins with the number of the line.
pub(crate) fn parse(text: &str, what: &str) -> Result<Node, String> {
    let mut documents = skysail_yaml::documents(text);
    let document =
        documents.next().ok_or_else(|| format!("1: the file is empty; write the fields of a {what}"))?;
    if let Some(second) = documents.next() {
        return Err(format!("{}: a second document; write each {what} to a file of its own", second.line));
    }
    if let Some((field, line, first)) = document.duplicates.first() {
        return Err(format!("{line}: {field}: also on line {first}; remove one of them"));
    }
    document.root.map_err(|error| format!("{}: {}; correct the syntax", error.line, error.message))
}
