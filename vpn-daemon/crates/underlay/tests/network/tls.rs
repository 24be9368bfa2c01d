//! HTTP-19, T-24, T-25: whom we trust, and how a refusal reads.

use codervpn_underlay::tls::TlsParameters;
use codervpn_underlay::{ConfigError, DialError, Dialer, DialerConfig, Target, TlsError, TlsFault};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{Ca, Server, serve, soon};

const NOW: (i32, i32) = (2020, 2100);

async fn tls_server(ca: &Ca, name: &str, years: (i32, i32)) -> Server {
    let acceptor = ca.acceptor(name, years);
    serve(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            if let Ok(mut stream) = acceptor.accept(stream).await {
                let _ = stream.write_all(b"hello").await;
                let _ = stream.shutdown().await;
            }
        }
    })
    .await
}

fn target(server: &Server, parameters: TlsParameters) -> Target {
    let url = url::Url::parse(&format!("https://{}/", server.address)).unwrap();
    let mut target = Target::from_url(&url).unwrap();
    target.tls = Some(parameters);
    target
}

fn trusting(ca: &Ca) -> (Dialer, tempfile::NamedTempFile) {
    let file = ca.file();
    let config = DialerConfig { extra_ca: Some(file.path().to_owned()), ..DialerConfig::default() };
    (Dialer::new(config).unwrap(), file)
}

async fn refused(dialer: &Dialer, target: &Target) -> (TlsFault, String) {
    match soon(dialer.connect(target)).await {
        Err(DialError::Tls { source: TlsError::Certificate(refusal), .. }) => (refusal.fault, refusal.to_string()),
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("the certificate was accepted"),
    }
}

#[tokio::test]
async fn http_19_a_certificate_of_the_extra_ca_is_accepted() {
    let ca = Ca::new("Test Root");
    let server = tls_server(&ca, "coder.test", NOW).await;
    let (dialer, _file) = trusting(&ca);
    let mut stream = soon(dialer.connect(&target(&server, TlsParameters::for_host("coder.test")))).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "hello");
    assert!(stream.is_tls());
}

#[tokio::test]
async fn an_unknown_issuer_is_named_with_the_key_that_fixes_it() {
    let server = tls_server(&Ca::new("Their Root"), "coder.test", NOW).await;
    let (dialer, _file) = trusting(&Ca::new("Our Root"));
    let (fault, text) = refused(&dialer, &target(&server, TlsParameters::for_host("coder.test"))).await;
    assert_eq!(fault, TlsFault::UnknownIssuer);
    assert!(text.contains("Their Root"), "{text}");
    assert!(text.contains("network.extra_ca"), "{text}");
}

#[tokio::test]
async fn expired_and_wrong_names_are_told_apart() {
    let ca = Ca::new("Test Root");
    let (dialer, _file) = trusting(&ca);
    let server = tls_server(&ca, "coder.test", (2001, 2002)).await;
    let (fault, text) = refused(&dialer, &target(&server, TlsParameters::for_host("coder.test"))).await;
    assert_eq!(fault, TlsFault::Expired, "{text}");

    let server = tls_server(&ca, "other.test", NOW).await;
    let (fault, text) = refused(&dialer, &target(&server, TlsParameters::for_host("coder.test"))).await;
    assert_eq!(fault, TlsFault::WrongName);
    assert!(text.contains("coder.test") && text.contains("other.test"), "{text}");
}

#[tokio::test]
async fn t25_the_certificate_name_replaces_the_host_name() {
    let ca = Ca::new("Test Root");
    let (dialer, _file) = trusting(&ca);
    let server = tls_server(&ca, "relay.test", NOW).await;
    let mut parameters = TlsParameters::for_host("front.test");
    parameters.certificate_name = Some("relay.test".into());
    soon(dialer.connect(&target(&server, parameters.clone()))).await.unwrap();
    parameters.certificate_name = Some("third.test".into());
    assert_eq!(refused(&dialer, &target(&server, parameters)).await.0, TlsFault::WrongName);
}

#[tokio::test]
async fn t24_insecure_accepts_anything() {
    let server = tls_server(&Ca::new("Their Root"), "x.test", (2001, 2002)).await;
    let (dialer, _file) = trusting(&Ca::new("Our Root"));
    let mut parameters = TlsParameters::for_host("coder.test");
    parameters.insecure = true;
    soon(dialer.connect(&target(&server, parameters))).await.unwrap();
}

#[tokio::test]
async fn a_server_without_tls_is_named() {
    let server = serve(|mut stream| async move {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        let _ = stream.read(&mut [0; 1024]).await;
    })
    .await;
    let (dialer, _file) = trusting(&Ca::new("Our Root"));
    let result = soon(dialer.connect(&target(&server, TlsParameters::for_host("coder.test")))).await;
    assert!(matches!(result, Err(DialError::Tls { source: TlsError::NotTls { .. }, .. })), "{result:?}");
}

#[test]
fn a_wrong_ca_file_fails_at_once() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let config = || DialerConfig { extra_ca: Some(file.path().to_owned()), ..DialerConfig::default() };
    assert!(matches!(Dialer::new(config()), Err(ConfigError::ExtraCaEmpty { .. })));
    std::fs::write(file.path(), "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    assert!(matches!(Dialer::new(config()), Err(ConfigError::ExtraCa { .. })));
    let missing = DialerConfig { extra_ca: Some("/nonexistent/ca.pem".into()), ..DialerConfig::default() };
    assert!(matches!(Dialer::new(missing), Err(ConfigError::ExtraCa { .. })));
}

/// `openssl req -x509` makes certificates that are their own CA.
#[tokio::test]
async fn a_self_signed_certificate_in_the_extra_ca_file_is_accepted_for_its_names() {
    let (acceptor, pem) = crate::support::self_signed_ca("coder.test");
    let server = serve(move |stream| {
        let acceptor = acceptor.clone();
        async move {
            let _ = acceptor.accept(stream).await;
        }
    })
    .await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), pem).unwrap();
    let config = DialerConfig { extra_ca: Some(file.path().to_owned()), ..DialerConfig::default() };
    let dialer = Dialer::new(config).unwrap();
    soon(dialer.connect(&target(&server, TlsParameters::for_host("coder.test")))).await.unwrap();
    let (fault, _) = refused(&dialer, &target(&server, TlsParameters::for_host("other.test"))).await;
    assert_eq!(fault, TlsFault::WrongName);

    let (stranger, _file) = trusting(&Ca::new("Our Root"));
    let (fault, text) = refused(&stranger, &target(&server, TlsParameters::for_host("coder.test"))).await;
    assert_eq!(fault, TlsFault::UnknownIssuer, "{text}");
}
