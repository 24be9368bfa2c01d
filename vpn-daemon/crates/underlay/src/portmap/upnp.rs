//! UPnP Internet gateway devices: found by SSDP, asked by SOAP. Their XML is searched for a handful of elements, not
//! parsed: what does not look as expected is no gateway for us.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use ::http::{HeaderName, HeaderValue, Method};
use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout_at};
use url::{Host, Url};

use super::{MapTarget, MapperOptions, Mapping, Protocol};
use crate::dialer::Dialer;
use crate::http::Request;

const SSDP_GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 255, 250);
/// Devices are told to answer within a second; those on the gateway do so at once.
const SSDP_WAIT: Duration = Duration::from_millis(700);
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// Descriptions are a few KiB.
const DESCRIPTION_LIMIT: usize = 256 * 1024;
const LONGEST: usize = 2048;
/// Best first.
const SERVICES: [&str; 4] = [
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:2",
];

/// Where a gateway takes orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Service {
    kind: &'static str,
    control: Url,
}

/// Looks for a gateway device on the gateway.
pub(super) async fn find(dialer: &Dialer, target: MapTarget, options: &MapperOptions) -> Option<Service> {
    let socket = UdpSocket::bind(SocketAddrV4::new(target.own, 0)).await.ok()?;
    let question = "M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: \"ssdp:discover\"\r\nMX: 1\r\n\
                    ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n";
    // Devices that do not hear one of the two ways are common.
    for address in [SSDP_GROUP, target.gateway] {
        let _ = socket.send_to(question.as_bytes(), SocketAddrV4::new(address, options.ssdp_port)).await;
    }
    let deadline = Instant::now() + SSDP_WAIT;
    let mut buffer = [0; LONGEST];
    loop {
        let (length, from) = timeout_at(deadline, socket.recv_from(&mut buffer)).await.ok()?.ok()?;
        // T-37: whoever else is on the link might send us anywhere.
        if from.ip() != target.gateway {
            continue;
        }
        let answer = String::from_utf8_lossy(buffer.get(..length)?).into_owned();
        let Some(location) = header(&answer, "location").and_then(|text| Url::parse(text).ok()) else { continue };
        if !is_on(&location, target.gateway) {
            continue;
        }
        let description = call(dialer, Request { method: Method::GET, ..Request::get(location.clone()) }).await?;
        return service_of(&description, &location, target.gateway);
    }
}

/// Adds or renews a mapping.
pub(super) async fn map(
    dialer: &Dialer,
    service: &Service,
    target: MapTarget,
    wished: u16,
    lifetime: u32,
) -> Option<Mapping> {
    let answer = soap(dialer, service, "GetExternalIPAddress", "").await?;
    let address: Ipv4Addr = element(&answer, "NewExternalIPAddress")?.trim().parse().ok()?;
    let port = if wished == 0 { target.port } else { wished };
    // Some gateways know only mappings without an end.
    for (seconds, life) in [(lifetime, lifetime), (0, lifetime)] {
        let arguments = format!(
            "<NewRemoteHost></NewRemoteHost><NewExternalPort>{port}</NewExternalPort><NewProtocol>UDP</NewProtocol>\
             <NewInternalPort>{}</NewInternalPort><NewInternalClient>{}</NewInternalClient><NewEnabled>1</NewEnabled>\
             <NewPortMappingDescription>codervpn</NewPortMappingDescription><NewLeaseDuration>{seconds}</NewLeaseDuration>",
            target.port, target.own
        );
        if soap(dialer, service, "AddPortMapping", &arguments).await.is_some() {
            let external = SocketAddrV4::new(address, port);
            let protocol = Protocol::Upnp(service.clone());
            return Some(Mapping { external, life: Duration::from_secs(life.into()), protocol });
        }
    }
    None
}

pub(super) async fn unmap(dialer: &Dialer, service: &Service, port: u16) {
    let arguments = format!(
        "<NewRemoteHost></NewRemoteHost><NewExternalPort>{port}</NewExternalPort><NewProtocol>UDP</NewProtocol>"
    );
    let _ = soap(dialer, service, "DeletePortMapping", &arguments).await;
}

async fn soap(dialer: &Dialer, service: &Service, action: &str, arguments: &str) -> Option<String> {
    let body = format!(
        "<?xml version=\"1.0\"?><s:Envelope xmlns:s=\"http://schemas.xmlsoap.org/soap/envelope/\" \
         s:encodingStyle=\"http://schemas.xmlsoap.org/soap/encoding/\"><s:Body><u:{action} xmlns:u=\"{}\">{arguments}\
         </u:{action}></s:Body></s:Envelope>",
        service.kind
    );
    let soap_action = HeaderValue::from_str(&format!("\"{}#{action}\"", service.kind)).ok()?;
    let request = Request { method: Method::POST, body: Bytes::from(body), ..Request::get(service.control.clone()) }
        .header(HeaderName::from_static("soapaction"), soap_action)
        .header(::http::header::CONTENT_TYPE, HeaderValue::from_static("text/xml; charset=\"utf-8\""));
    call(dialer, request).await
}

/// Nothing of the user's goes along: neither headers nor a token.
async fn call(dialer: &Dialer, request: Request) -> Option<String> {
    let request = Request { user_headers: false, limit: CALL_LIMIT, body_limit: DESCRIPTION_LIMIT, ..request };
    let response = dialer.request(&request).await.ok()?.success().ok()?;
    Some(String::from_utf8_lossy(&response.body).into_owned())
}

fn header<'a>(message: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = message.split("\r\n");
    if !lines.next()?.contains(" 200") {
        return None;
    }
    lines.find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.trim().eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

fn is_on(url: &Url, gateway: Ipv4Addr) -> bool {
    url.scheme() == "http" && url.host() == Some(Host::Ipv4(gateway))
}

/// The text of the first element of this name.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0)
}

fn service_of(description: &str, location: &Url, gateway: Ipv4Addr) -> Option<Service> {
    let blocks: Vec<&str> =
        description.split("<service>").skip(1).filter_map(|rest| rest.split_once("</service>")).map(|b| b.0).collect();
    let base = element(description, "URLBase").and_then(|text| Url::parse(text.trim()).ok());
    let base = base.filter(|base| is_on(base, gateway)).unwrap_or_else(|| location.clone());
    SERVICES.into_iter().find_map(|kind| {
        let block =
            blocks.iter().find(|block| element(block, "serviceType").is_some_and(|text| text.trim() == kind))?;
        let control = base.join(element(block, "controlURL")?.trim()).ok()?;
        is_on(&control, gateway).then_some(Service { kind, control })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

    #[test]
    fn a_description_names_the_service_only_on_the_gateway() {
        let location = Url::parse("http://10.0.0.1:5000/root.xml").unwrap();
        let description = |control: &str| {
            format!(
                "<root><device><serviceList><service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1\
                 </serviceType><controlURL>/l3</controlURL></service></serviceList><service><serviceType>{}</serviceType>\
                 <controlURL>{control}</controlURL></service></device></root>",
                SERVICES[1]
            )
        };
        let service = service_of(&description("/ctl/IPConn"), &location, GATEWAY).unwrap();
        assert_eq!((service.kind, service.control.as_str()), (SERVICES[1], "http://10.0.0.1:5000/ctl/IPConn"));
        assert!(service_of(&description("http://192.0.2.9/ctl"), &location, GATEWAY).is_none());
        assert!(service_of("<root></root>", &location, GATEWAY).is_none());
    }

    #[test]
    fn an_answer_without_a_location_is_none() {
        assert_eq!(header("HTTP/1.1 200 OK\r\nLocation: http://x/\r\n\r\n", "location"), Some("http://x/"));
        assert_eq!(header("HTTP/1.1 404 No\r\nLocation: http://x/\r\n\r\n", "location"), None);
        assert_eq!(header("NOTIFY * HTTP/1.1\r\nLOCATION: http://x/\r\n\r\n", "location"), None);
    }
}
