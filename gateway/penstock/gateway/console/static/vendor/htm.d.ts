type Template = (strings: TemplateStringsArray, ...values: unknown[]) => unknown;
declare const htm: {bind(h: unknown): Template};
export default htm;
